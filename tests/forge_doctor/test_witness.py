"""A witness marks every tensor of a run in the order in which it was made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge.testing import Record, TinyGAN, TinyTask, assert_same, first_difference, fit_tiny
from forge_doctor.witness import Witness, eager_modules
from forge_plugins import Accumulate


def record(updates: int = 6, plugins: Any = (), **options: Any) -> Record:
    made = Record()
    fit_tiny([*plugins, Witness(made, updates)], **options)
    return made


def kinds(made: Record, update: int) -> list[str]:
    return list(dict.fromkeys(mark.kind for mark in made.marks if mark.update == update and not mark.aside))


def names(made: Record, kind: str, update: int = 1) -> list[str]:
    return [mark.path for mark in made.marks if (mark.update, mark.kind) == (update, kind)]


# -- what a run leaves ------------------------------------------------------------------------------------------------


def test_an_update_is_written_down_in_its_order() -> None:
    made = record()
    assert kinds(made, 0) == ["device", "first parameter", "first buffer"]
    order = ["batch", "rng before", "output", "loss", "gradient", "parameter", "buffer", "optimizer", "rng"]
    assert kinds(made, 1) == order
    assert names(made, "output") == [
        f"net.{i} ({name})" for i, name in enumerate(["Linear", "BatchNorm1d", "ReLU", "Dropout", "Linear"])
    ] + ["net (Sequential)"]
    assert names(made, "batch") == ["micro-batch 0, batch[0]", "micro-batch 0, batch[1]"]


def test_gradients_come_in_the_order_of_the_backward_pass() -> None:
    class TwoEnds(TinyTask):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3, 3)  # defined last, and used last
            self.first = nn.Linear(6, 6)  # defined after it, and used first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.net(self.first(x)))

    gradients = names(record(task=TwoEnds()), "gradient")
    assert {*gradients[:2]} == {"last.weight", "last.bias"}
    assert {*gradients[-2:]} == {"first.weight", "first.bias"}


def test_the_run_ends_after_its_updates_and_is_not_changed() -> None:
    plain, _ = fit_tiny([], max_updates=4)
    task, result = fit_tiny([Witness(Record(), 4)])
    assert result.updates == 4
    assert_same(task, plain)
    assert not any(part._forward_hooks for part in task.modules())


def test_two_equal_runs_leave_equal_records() -> None:
    one, other, third = (record(seed=seed) for seed in (0, 0, 1))
    assert {mark.update for mark in one.marks} == set(range(7))
    assert first_difference(one, other) is None
    found = first_difference(one, third)
    assert found is not None
    assert (found.update, found.kind) == (1, "rng before")


@pytest.mark.parametrize("task", [TinyGAN, TinyTask])
def test_several_optimizers_are_written_down_turn_by_turn(task: Any) -> None:
    one, other = (record(plugins=[Accumulate(2)], task=task()) for _ in "ab")
    assert first_difference(one, other) is None
    turns = [""] if task is TinyTask else ["generator, ", "discriminator, "]
    assert names(one, "loss") == [f"{turn}micro-batch {i}" for turn in turns for i in range(2)]


def test_an_optimizer_that_asks_again_is_followed() -> None:
    class Closure(TinyTask):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=2)

    one, other = (record(2, task=Closure()) for _ in "ab")
    assert first_difference(one, other) is None
    assert len(names(one, "loss")) > 1


def test_what_is_thawed_later_is_seen_too() -> None:
    task = TinyTask()
    frozen = task.get_parameter("net.0.weight").requires_grad_(False)

    @forge.on("step_end", mutates=True)
    def thaw(step: forge.Step) -> None:
        frozen.requires_grad_(True)

    made = record(plugins=[thaw], task=task)
    assert "net.0.weight" not in names(made, "gradient")
    assert "net.0.weight" in names(made, "gradient", update=2)


def test_modules_that_are_compiled_are_left_alone() -> None:
    task = TinyTask()
    task.get_submodule("net.3").compile(backend="eager")
    trainer = forge.Trainer(max_updates=1, plugins=[])
    trainer.task, trainer.model = task, task
    assert [name for name, _ in eager_modules(trainer)] == ["net", "net.0", "net.1", "net.2", "net.4"]
    task.net.compile(backend="eager")
    assert [name for name, _ in eager_modules(trainer)] == []
