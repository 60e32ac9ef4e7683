"""speed_range on real tasks: fresh copies, equal bits, facts, refusals; nobody looks at the times."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge.data import TensorLoader
from forge.errors import ForgeError
from forge.testing import TinyTask, tiny_batches
from forge.tuning import Change, Lever, speed_range, step_timer
from forge.util import peak_memory
from forge.util.time_limit import TrialTooLong, time_limit
from forge_plugins import Clip
from forge_speed.speed import StepTrials
from forge_speed.speed_search import LeverFailed
from tests.forge_plugins.test_speed_switches import Pictures, pictures


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CHUNK", 0.0), ("SECONDS", 0.0), ("SHORT_EPOCH", 0.0), ("CHUNKS", 2)):
        monkeypatch.setattr(step_timer, name, value)
    monkeypatch.setattr(peak_memory, "clean", lambda: None)


def trials(make: Any = TinyTask, train: Any = None, **options: Any) -> StepTrials:
    made = StepTrials(make, lambda: tiny_batches() if train is None else train, device="cpu", **options)
    made.look()
    return made


def adding(name: str, numbers: Any = "rounding", **options: Any) -> Lever:
    return Lever(name, Change({name: options}), numbers)


def test_every_trial_begins_with_the_same_weights_and_data() -> None:
    x = torch.randn(64, 6)
    loader = TensorLoader(x, torch.randint(3, (64,)), batch_size=8, shuffle=True)
    measure = trials(train=loader)
    for _ in range(2):
        reading = measure([])
        assert reading.same
        assert reading.ms > 0
        assert reading.memory


def test_a_change_of_the_bits_is_seen() -> None:
    measure = trials()
    assert measure([adding("prefetch", "bitwise")]).same
    clipped = measure([adding("clip", max_norm=1e-3)])
    assert clipped.same is False


def test_weights_that_are_not_finite_are_a_failure() -> None:
    class Breaks(TinyTask):
        def training_step(self, batch: Any) -> Any:
            out = super().training_step(batch)
            assert self.trainer is not None
            return {**out, "loss": out["loss"] * float("nan")} if "clip" in self.trainer.stack else out

    with pytest.raises(LeverFailed, match="not finite"):
        trials(Breaks)([adding("clip")])


def test_a_conflict_with_a_plugin_that_trials_leave_out_is_found() -> None:
    class Keeps(forge.Plugin):
        observer = True
        conflicts = {"clip": "Clipping is not for it."}

    with pytest.raises(LeverFailed, match="Clipping is not for it"):
        trials(plugins=[Keeps()])([adding("clip")])


def test_an_error_of_the_start_is_the_users() -> None:
    class Wrong(TinyTask):
        def training_step(self, batch: Any) -> Any:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        speed_range(Wrong, tiny_batches, device="cpu")


def test_facts_are_learned_from_the_first_trial() -> None:
    facts = trials(Pictures, pictures()).facts
    assert facts.convolutions
    assert not facts.batch_norm
    assert facts.inputs == "float32[4, 3, 8, 8], int64[4]"
    assert not facts.not_fused
    assert facts.float32


@pytest.mark.slow
def test_the_whole_search_runs_and_writes_nothing(empty_folder: Path) -> None:
    told: list[str] = []
    report = speed_range(
        Pictures, pictures, numbers="rounding", leave_out=["compile"], device="cpu", plugins=[Clip()], tell=told.append
    )
    tried = {row.lever.name for row in report.rows if row.alone is not None}
    assert tried == {"fused_optimizer", "channels_last"}
    assert report.reproducible
    assert report.best is None or report.best.ms < report.start.ms
    assert any(line.startswith("channels_last: ") for line in told)
    assert not list(empty_folder.iterdir())


@pytest.mark.parametrize("options", [{"numbers": "some"}, {"limit": 0.0}, {"budget": -1.0}])
def test_senseless_options_are_refused(options: Any) -> None:
    with pytest.raises(ForgeError, match=next(iter(options))):
        speed_range(TinyTask, tiny_batches, **options)


def test_a_trial_that_takes_too_long_is_stopped() -> None:
    def stuck() -> None:
        while True:
            time.sleep(0.005)

    with pytest.raises(TrialTooLong), time_limit(0.02):
        stuck()
    with time_limit(60):
        pass
