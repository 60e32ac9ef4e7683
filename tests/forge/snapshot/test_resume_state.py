"""Optimizers, schedules and modules of every kind go on where they were when a run is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forge
from forge.report.page import page
from forge.runs.folder import RunFolder
from forge.testing import TinyTask, assert_same, tiny_batches
from forge_plugins import JSONL, Checkpoint
from tests.forge.snapshot.test_resume import die, live, log_of, resumes
from tests.support.tasks import fit, make_batches, noting


class Built(TinyTask):
    """A TinyTask with an optimizer of the test's choice."""

    def __init__(self, make: Callable[[Any], Any]):
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def ends_the_same(folder: Path, make: Callable[[], Any], cut: int = 4, **options: Any) -> Any:
    """The resumed task, after it was held equal to one that ran straight."""
    made: list[Any] = []

    def given() -> dict[str, Any]:
        made.append(make())
        return {"task": made[-1], **options}

    resumes(folder, given, lambda updates: [cut], plugins=lambda: [JSONL()])
    assert log_of(folder / "cut") == log_of(folder / "straight")
    return made[-1]


class Finer(torch.optim.SGD):
    """Keeps float64 and whole numbers inside a list, beside float32 parameters."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("kept", [torch.zeros_like(p, dtype=torch.float64), torch.tensor(0)])
                    kept[0] += p.grad.double() / 3
                    kept[1] += 1
                    p.data -= (0.1 * kept[0] / kept[1]).float()


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "multi-step": lambda o: (o, torch.optim.lr_scheduler.MultiStepLR(o, [2, 5, 5])),
    "sequential": lambda o: (
        o,
        torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.MultiStepLR(o, [2, 4])], [3]
        ),
    ),
    "plateau": lambda o: (o, torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0)),
    "per epoch": lambda o: (o, torch.optim.lr_scheduler.StepLR(o, 1), "1 epoch"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("multi-step", "per epoch"))) for kind in SCHEDULES]
)  # it is a part of the sequential one
def test_schedules_go_on_where_they_were(tmp_path: Path, kind: str) -> None:
    ends_the_same(tmp_path, lambda: Built(lambda p: SCHEDULES[kind](torch.optim.SGD(p, lr=0.1))))


@pytest.mark.parametrize(
    "make",
    [
        Finer,
        lambda p: torch.optim.LBFGS(p, max_iter=3),
        pytest.param(lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)), marks=pytest.mark.slow),
        pytest.param(lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True), marks=pytest.mark.slow),
    ],
    ids=["finer", "lbfgs", "tensor lr", "amsgrad"],
)
def test_optimizers_go_on_where_they_were(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    ends_the_same(tmp_path, lambda: Built(make))


class Thaws(TinyTask):
    """Freezes its first layer; update 2 thaws it, and puts its BatchNorm to rest."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        if step.index == 2:
            self.net[0].requires_grad_(True)
            self.net[1].eval()


def test_what_was_thawed_or_put_to_rest_on_the_way_stays_so(tmp_path: Path) -> None:
    resumed = ends_the_same(tmp_path, Thaws, cut=7)
    assert resumed.net[0].weight.requires_grad
    assert not resumed.net[1].training


class Remembers(TinyTask):
    """Extra state that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(0)

    def training_step(self, batch: Any) -> Any:
        self.seen = torch.cat([self.seen, batch[0].mean().reshape(1)])
        return super().training_step(batch)

    def get_extra_state(self) -> torch.Tensor:
        return self.seen

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = state


def test_extra_state_may_change_its_size(tmp_path: Path) -> None:
    resumed = ends_the_same(tmp_path, Remembers)
    assert len(resumed.seen) == 3 * len(tiny_batches())


class Numbers(TinyTask):
    """Metrics and weights that are numpy's numbers."""

    def training_step(self, batch: Any) -> Any:
        return {**super().training_step(batch), "half": np.float64(0.5), "whole": np.int64(2)}

    def num_items(self, batch: Any) -> Any:
        return np.int64(len(batch[0]))


@pytest.mark.slow
def test_numbers_of_numpy_are_saved_like_any_other(tmp_path: Path) -> None:
    ends_the_same(tmp_path, Numbers)


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        (torch.optim.SGD, torch.optim.AdamW, "was trained with SGD; this run has AdamW"),
        (torch.optim.Adam, torch.optim.AdamW, "was trained with Adam; this run has AdamW"),
    ],
)
def test_another_optimizer_is_refused_and_nothing_changed(tmp_path: Path, then: Any, now: Any, said: str) -> None:
    die(tmp_path, [Checkpoint(every="1 update")], 3, task=Built(lambda p: then(p, lr=0.1)))
    task = Built(lambda p: now(p, lr=0.1))
    with pytest.raises(forge.CheckpointError, match=said):
        live(tmp_path, [Checkpoint()], task=task)
    assert_same(task, TinyTask())


def test_an_lr_that_is_not_used_is_worth_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    die(tmp_path, [Checkpoint(every="1 update")], 3, task=Built(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5)))
    live(tmp_path, [Checkpoint()], task=Built(lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.6)))
    assert "SGD continues with lr=0.1 from the checkpoint; 0.2 is ignored" in caplog.text
    assert "SGD continues with momentum=0.5 from the checkpoint; 0.6 is ignored" in caplog.text


KEPT = "SGD lr=0.1 (0.2 is not used), SGD momentum=0.5 (0.6 is not used)"


def test_what_is_not_used_is_in_the_files_of_the_run(tmp_path: Path) -> None:
    def built(lr: float, momentum: float) -> Built:
        return Built(lambda p: torch.optim.SGD(_in_two(p), lr=lr, momentum=momentum))

    def told(**options: Any) -> tuple[str, str, str]:
        live(tmp_path, [], recipe="default", **options)
        config, card = ((tmp_path / name).read_text() for name in ("config.yaml", "card.md"))
        return config.partition("description")[0], card, page([RunFolder(tmp_path)])

    for text in told(task=built(0.1, 0.5), max_epochs=1):
        assert "is not used" not in text
    config, card, report = told(task=built(0.2, 0.6), max_epochs=2)
    assert f"# Resumed from update 5 with the optimizer's options as saved: {KEPT}. " in config
    assert f"| kept as saved | {KEPT} |" in card
    assert f"<td class='k'>kept as saved</td><td>{KEPT}</td>" in report
    assert forge.recipe(tmp_path / "config.yaml").trainer["max_epochs"] == 2
    options = json.loads((tmp_path / "card.json").read_text())["kept_options"]
    assert options[0] == {"optimizer": "SGD", "option": "lr", "used": 0.1, "given": 0.2}
    for text in told(task=built(0.1, 0.5), max_epochs=3):
        assert "is not used" not in text


def _in_two(parameters: Any) -> list[dict[str, Any]]:
    """Two parameter groups: what they have in common is said once."""
    first, *others = parameters
    return [{"params": [first]}, {"params": others}]


class Odd(torch.optim.SGD):
    """Puts something into its state that no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.state[self.param_groups[0]["params"][0]]["seen"] = {1, 2}


def test_unsavable_optimizer_state_is_refused_at_once(tmp_path: Path) -> None:

    count, seen = noting("boundary", lambda trainer: trainer.progress.update)
    with pytest.raises(forge.CheckpointError, match=r"seen.*is a set"):
        live(tmp_path, [Checkpoint(), count], task=Built(lambda p: Odd(p, lr=0.1)))
    assert seen == [1]


def test_a_plugin_can_say_on_restore_that_the_run_was_over(tmp_path: Path) -> None:
    class Enough(forge.Plugin):
        """Stops after three updates, and knows it when it comes back."""

        stopped = False

        @forge.hookimpl
        def forge_step_end(self, step: forge.Step) -> None:
            if step.index == 2:
                self.stopped = True
                step.trainer.request_stop("three are enough")

        @forge.hookimpl
        def forge_state_dict(self) -> dict[str, Any]:
            return {"stopped": self.stopped}

        @forge.hookimpl
        def forge_load_state_dict(self, trainer: forge.Trainer, state: dict[str, Any]) -> None:
            if state["stopped"]:
                trainer.request_stop("three were enough")

    first, second = (
        fit(plugins=[Enough(), Checkpoint()], train=make_batches(6), run_dir=tmp_path, resume="auto") for _ in range(2)
    )
    assert first.updates == second.updates == 3
    assert second.stop_reason == "enough: three were enough"
