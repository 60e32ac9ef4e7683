"""The plugin `kernels` with `auto`: it measures, and remembers what it has measured."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from forge import registry
from forge.errors import StackError
from forge.testing import assert_same_weights, fit_tiny, tiny_batches
from forge_plugins import DDP, Checkpoint, Remat
from forge_speed.kernels import Kernels
from forge_speed.kernels.judgement import StepTrial
from tests.support import kernels_plugin_kit
from tests.support.kernels_plugin_kit import Clock, measure_steps, ran
from tests.support.lasting_ranks import ranks
from tests.support.toy_kernels import CALLS, entries

clean = kernels_plugin_kit.clean
install = kernels_plugin_kit.install
clock = kernels_plugin_kit.clock


# ---------------------------------------------------------------------------------------------------------------------
# auto


def test_off_cuda_nothing_is_swapped_and_the_log_says_so_once(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    install("toy", "toy_linear")
    caplog.set_level(logging.INFO, "forge")
    for use in ("auto", "all"):
        ours, _ = fit_tiny([Kernels(use)])
        assert_same_weights(ours, fit_tiny([])[0])
    assert ran() == []
    said = [record.getMessage() for record in caplog.records if "kernels" in record.getMessage()]
    assert said == ["kernels: nothing is swapped: they run on CUDA, and this run is on cpu."] * 2


def test_auto_uses_a_kernel_that_makes_the_step_faster(install: Any, clock: type[Clock]) -> None:
    install("toy")
    fit_tiny([Kernels("auto")], train=tiny_batches([8, 8, 5]), max_epochs=1, val=tiny_batches([8, 4]))
    assert clock.measured == 1
    # checked once, tried once, then three updates and two batches of the validation
    assert [rows for _, (rows, _) in CALLS] == [8, 8, 8, 8, 5, 8, 4]


@pytest.mark.parametrize(("ms", "used"), [(0.97, True), (0.99, False), (2.0, False)])
def test_the_whole_step_decides(
    install: Any, clock: type[Clock], ms: float, used: bool, caplog: pytest.LogCaptureFixture
) -> None:
    install("toy")
    clock.ms = ms
    caplog.set_level(logging.INFO, "forge")
    fit_tiny([Kernels()], max_updates=2)
    assert (len(CALLS) > 2) is used
    assert "in the first batch toy takes 1 call." in caplog.text
    assert f"forward and backward of the first batch: as written 1 ms; with toy {ms:g} ms" in caplog.text
    assert ("(used)" in caplog.text) is used


def test_a_step_under_trial_leaves_no_trace(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "_acts_on", lambda self, device: True)
    monkeypatch.setattr("forge_speed.kernels.judgement.LEAST_GAIN", 2.0)  # nothing is kept
    install("toy", "toy_linear")
    ours, _ = fit_tiny([Kernels(cache=False)])
    assert {"toy", "toy_linear"} == set(ran())
    assert_same_weights(ours, fit_tiny([])[0])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("toy_wrong", "result 1 is off by"),
        ("toy_fussy", "it does not take this call"),
        ("toy_broken", "it fails: RuntimeError: no such instruction"),
    ],
)
def test_auto_does_not_count_a_kernel_that_is_wrong(
    install: Any, clock: type[Clock], name: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(name)
    caplog.set_level(logging.INFO, "forge")
    ours, _ = fit_tiny([Kernels()])
    assert clock.measured == 0
    assert f"{name}: {why}" in caplog.text
    assert_same_weights(ours, fit_tiny([])[0])


def test_looking_and_measuring_leave_no_trace_in_the_run(install: Any, clock: type[Clock]) -> None:
    install("toy", "toy_linear")
    clock.ms = 2.0
    ours, _ = fit_tiny([Kernels()])
    assert clock.measured == 1
    assert_same_weights(ours, fit_tiny([])[0])


def test_auto_sees_through_blocks_that_are_computed_again(install: Any, clock: type[Clock]) -> None:
    install("toy")
    ours, _ = fit_tiny([Remat(modules="net"), Kernels(cache=False)], max_updates=2)
    assert clock.measured == 1
    assert ran()[-4:] == ["toy"] * 4
    theirs, _ = fit_tiny([Kernels("toy")], max_updates=2)
    assert_same_weights(ours, theirs)


def on_one_rank(cache: str | bool = False, rows: int = 8, stack: tuple[Any, ...] = (DDP,)) -> dict[str, Any]:
    """A fit under `auto` on one of several ranks: who measured what, and what ran."""
    others, found = registry.installed, entries("toy", "toy_linear")
    CALLS.clear()
    Clock.measured = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "installed", lambda kind: found if kind == "kernel" else others(kind))
        patch.setattr(StepTrial, "measure", measure_steps(Clock))
        patch.setattr(Kernels, "_acts_on", lambda self, device: True)
        options: dict[str, Any] = {"max_updates": 4, "validate_every": None}
        plugins = [*(make() for make in stack), Kernels(cache=cache)]
        task, _ = fit_tiny(plugins, train=tiny_batches([rows] * 4), **options)
    weights = {name: value.detach().clone() for name, value in task.named_parameters()}
    return {"measured": Clock.measured, "calls": CALLS[-8:], "weights": weights}


@pytest.mark.slow
def test_several_ranks_measure_nothing_and_run_as_written() -> None:
    first, second = ranks(2)(on_one_rank)
    assert (first["measured"], second["measured"]) == (0, 0)
    assert first["calls"] == second["calls"] == [("toy_linear", (4, 6)), ("toy", (4, 8))]  # the check of each
    assert_same_weights(first["weights"], second["weights"])


# ---------------------------------------------------------------------------------------------------------------------
# Known from before


def test_a_second_run_knows_what_the_first_one_measured(
    install: Any, clock: type[Clock], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    install("toy")
    fit_tiny([Kernels()], max_updates=1)
    CALLS.clear()
    clock.ms = 2.0  # would decide otherwise now
    caplog.set_level(logging.INFO, "forge")
    fit_tiny([Kernels()], max_updates=2)
    assert clock.measured == 1
    assert ran() == ["toy"] * 3  # checked, and used twice
    assert "known from an earlier run" in caplog.text
    assert (tmp_path / "cache" / "forge" / "kernels.json").is_file()


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"form": 2, "known": 3}', '{"form": 2, "known": {"KEY": 7}}'])
def test_a_damaged_cache_is_measured_anew(install: Any, clock: type[Clock], tmp_path: Path, damage: str) -> None:
    install("toy")
    folder = tmp_path / "own"
    fit_tiny([Kernels(cache=str(folder))], max_updates=1)
    key = next(iter(json.loads((folder / "kernels.json").read_text())["known"]))
    (folder / "kernels.json").write_text(damage.replace("KEY", key))
    fit_tiny([Kernels(cache=str(folder))], max_updates=1)
    assert clock.measured == 2
    assert key in json.loads((folder / "kernels.json").read_text())["known"]


def test_a_kernel_whose_source_changed_is_measured_again(
    install: Any, clock: type[Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("toy")
    fit_tiny([Kernels()], max_updates=1)
    monkeypatch.setattr("forge_kernels.discovery.version", lambda kernel: "another")
    fit_tiny([Kernels()], max_updates=1)
    assert clock.measured == 2


def test_a_resumed_run_uses_the_kernels_that_it_began_with(install: Any, clock: type[Clock], tmp_path: Path) -> None:
    install("toy", "toy_linear")

    def run(folder: str, updates: int, **options: Any) -> Any:
        plugins = [Kernels(cache=False), Checkpoint(every="2 updates", keep=9)]
        return fit_tiny(plugins, max_epochs=None, max_updates=updates, run_dir=tmp_path / folder, **options)[0]

    straight = run("straight", 6)
    CALLS.clear()
    clock.ms, clock.measured = 2.0, 0
    resumed = run("resumed", 6, resume=tmp_path / "straight" / "checkpoints" / "update-00000002")
    assert clock.measured == 0
    assert set(ran()) == {"toy", "toy_linear"}
    assert_same_weights(resumed, straight)


def test_a_run_whose_kernel_is_gone_is_not_resumed_silently(install: Any, clock: type[Clock], tmp_path: Path) -> None:
    install("toy")

    def run(**options: Any) -> None:
        fit_tiny([Kernels(), Checkpoint(every="1 updates")], max_epochs=None, run_dir=tmp_path / "run", **options)

    run(max_updates=1)
    install("toy_fussy")
    with pytest.raises(StackError, match="used the kernel 'toy', which is not available now"):
        run(max_updates=2, resume="auto")
