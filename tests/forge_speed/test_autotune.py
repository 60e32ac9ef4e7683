"""autotune: found once, before the stack is built; kept by the run, by the cache and by every rank."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import forge
from forge.checkpoint import StoredCheckpoint
from forge.errors import RecipeError
from forge.testing import TinyTask, assert_same_weights, tiny_batches
from forge.tuning import Change, Lever, SpeedReport, StepReading, step_timer
from forge.util import peak_memory
from forge_plugins import Checkpoint, Clip, FusedOptimizer
from forge_speed import autotune
from forge_speed.autotune import Autotune
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some


class Searches:
    """Stands in for the search, and counts how often it is asked."""

    def __init__(self, answer: dict[str, dict[str, Any]]):
        self.answer, self.asked = answer, []

    def __call__(self, make_task: Any, make_train: Any, **options: Any) -> SpeedReport:
        self.asked.append({"task": make_task(), "train": make_train(), **options})
        levers = [Lever(name, Change({name: given}), "rounding") for name, given in self.answer.items()]
        return SpeedReport(StepReading(2.0), [], StepReading(1.0) if levers else None, levers)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Searches:
    found = Searches({"fused_optimizer": {}, "clip": {"max_norm": 0.5}})
    monkeypatch.setattr(autotune, "speed_range", found)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return found


def fit(*plugins: Any, task: Any = None, train: Any = None, **options: Any) -> tuple[forge.Trainer, forge.TaskModule]:
    settings = {"max_epochs": 2, "seed": 3, "run_dir": False, "device": "cpu", **options}
    trainer = forge.Trainer(plugins=list(plugins), **settings)
    task = TinyTask() if task is None else task
    trainer.fit(task, tiny_batches() if train is None else train)
    return trainer, task


def test_the_answer_is_added_to_the_stack_of_this_run_only(searches: Searches) -> None:
    seen: list[list[str]] = []

    @forge.on("start")
    def look(trainer: forge.Run) -> None:
        seen.append(trainer.stack.names)

    trainer, tuned = fit("autotune", look)
    assert seen == [["autotune", "look", "fused_optimizer", "clip"]]
    assert trainer.stack.names == ["autotune", "look"]
    _, by_hand = fit(FusedOptimizer(), Clip(0.5))
    assert_same_weights(tuned, by_hand)


def test_the_users_choice_wins(searches: Searches) -> None:
    _, tuned = fit("autotune", Clip(0.1))
    _, by_hand = fit(Clip(0.1), FusedOptimizer())
    assert_same_weights(tuned, by_hand)
    assert searches.asked[0]["only_adds"]
    assert [plugin.name for plugin in searches.asked[0]["plugins"]] == ["clip"]


def test_trials_get_copies_and_leave_no_trace(searches: Searches) -> None:
    task, train = TinyTask(), tiny_batches()
    fit("autotune", task=task, train=train)
    (asked,) = searches.asked
    assert asked["task"] is not task
    assert asked["train"] is train
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    searches.answer = {}
    searches.asked.clear()
    fit("autotune", seed=None, task=TinyTaskOfOnes())
    assert searches.asked
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), expected)


class TinyTaskOfOnes(TinyTask):
    """Another class: its answer is not known yet."""


def test_a_real_search_changes_nothing_but_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CHUNK", 0.0), ("SECONDS", 0.0), ("SHORT_EPOCH", 0.0), ("CHUNKS", 2)):
        monkeypatch.setattr(step_timer, name, value)
    monkeypatch.setattr(peak_memory, "clean", lambda: None)
    asleep = Autotune(cache=False, leave_out=["compile", "fused_optimizer"])
    torch.manual_seed(1)
    _, tuned = fit(asleep, seed=None)
    torch.manual_seed(1)
    _, plain = fit(seed=None)
    assert asleep.answer == {}
    assert_same_weights(tuned, plain)


def test_the_cache_answers_the_next_run_of_the_same_task(searches: Searches, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forge")
    fit("autotune")
    assert "2.00 times as fast" in caplog.text
    fit("autotune")
    assert len(searches.asked) == 1
    assert "as found before" in caplog.text
    fit("autotune", train=[(x[:4], y[:4]) for x, y in tiny_batches()])
    fit("autotune", task=TinyTaskOfOnes())
    fit(Autotune(numbers="bitwise"))
    assert len(searches.asked) == 4
    fit(Autotune(cache=False))
    assert len(searches.asked) == 5


def test_the_run_keeps_the_answer_in_its_config_and_checkpoints(searches: Searches, empty_folder: Path) -> None:
    plugins = {"autotune": {}, "tensorboard": None}
    trainer = forge.Trainer(recipe="default", plugins=plugins, max_epochs=1, seed=0, run_dir="run", device="cpu")
    recipe = trainer.recipe
    trainer.fit(TinyTask(), tiny_batches())
    assert trainer.recipe is recipe
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["plugins"]["fused_optimizer"] == {}
    assert config["plugins"]["clip"] == {"max_norm": 0.5}
    outline = StoredCheckpoint.find("run").outline()
    assert outline["plugins"]["autotune"]["answer"] == searches.answer
    assert {"fused_optimizer", "clip"} <= {plugin["name"] for plugin in outline["stack"]}


@pytest.mark.parametrize("how", some(["auto", "run", "checkpoint", "named"], quick=1))
def test_a_resume_reuses_the_answer_bit_for_bit(searches: Searches, empty_folder: Path, how: str) -> None:
    whole = fit(Autotune(cache=False), Checkpoint(), max_epochs=4)[1]
    options: dict[str, Any] = {"run_dir": "run"} if how != "named" else {"run_dir": None}
    first, _ = fit(Autotune(cache=False), Checkpoint(), max_epochs=2, **options)
    searches.asked.clear()
    searches.answer = {}
    assert first.run_dir is not None
    newest = max((first.run_dir / "checkpoints").glob("update-*"))
    resumes: dict[str, dict[str, Any]] = {
        "auto": {"run_dir": "run", "resume": "auto"},
        "run": {"run_dir": None, "resume": "run"},
        "checkpoint": {"run_dir": "other", "resume": newest},
        "named": {"run_dir": None, "resume": "auto"},
    }
    _, resumed = fit(Autotune(cache=False), Checkpoint(), max_epochs=4, **resumes[how])
    assert not searches.asked
    assert_same_weights(resumed, whole)


def test_a_search_that_fails_leaves_the_stack_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no such device")

    monkeypatch.setattr(autotune, "speed_range", fail)
    _, tuned = fit(Autotune(cache=False))
    assert_same_weights(tuned, fit()[1])
    assert "nothing was measured: RuntimeError: no such device" in caplog.text


@pytest.mark.parametrize("options", [{"budget": 0.0}, {"limit": -1.0}, {"answer": {"clip": 3}}])
def test_senseless_options_are_refused(options: Any) -> None:
    with pytest.raises(RecipeError, match=f"autotune.{next(iter(options))}"):
        Autotune(**options)


def on_a_rank(folder: str) -> tuple[Any, list[Any]]:
    """A fit on one of two ranks: its answer, and the searches that it made."""
    first = os.environ["RANK"] == "0"
    found = Searches({"clip": {"max_norm": 0.5}} if first else {"clip": {"max_norm": 99.0}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotune, "speed_range", found)
        tuned = Autotune(cache=folder)
        trainer = forge.Trainer(plugins=[tuned, "ddp"], max_epochs=1, seed=0, run_dir=False, device="cpu")
        trainer.fit(TinyTask(), tiny_batches())
    return tuned.answer, [asked["share"] for asked in found.asked]


def test_the_first_rank_decides_for_all(tmp_path: Path) -> None:
    first, second = ranks(2)(on_a_rank, str(tmp_path))
    assert first == ({"clip": {"max_norm": 0.5}}, [2])
    assert second == ({"clip": {"max_norm": 0.5}}, [])


def searching_rank() -> Any:
    """The answer of a real search inside one of two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("CHUNK", 0.0), ("SECONDS", 0.0), ("SHORT_EPOCH", 0.0), ("CHUNKS", 2)):
            patch.setattr(step_timer, name, value)
        tuned = Autotune(cache=False, leave_out="compile")
        trainer = forge.Trainer(plugins=[tuned, "ddp"], max_epochs=1, seed=0, run_dir=False, device="cpu")
        trainer.fit(TinyTask(), tiny_batches())
    return tuned.answer


@pytest.mark.slow
def test_a_real_search_on_two_ranks_gives_one_answer() -> None:
    first, second = ranks(2)(searching_rank)
    assert first == second
