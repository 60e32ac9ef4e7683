"""A witness marks what goes into each update and what it computes, in that order, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge.cli.witness import LOSS, NUMBERS_BEFORE, Witness
from forge.snapshot.evidence import BATCH, NUMBERS, OPTIMIZER, WEIGHTS
from forge.testing import Record, TinyGAN, TinyTask, assert_same, first_difference, fit_tiny
from forge.twin.record import GRADIENTS, OUTPUTS
from forge_plugins import Accumulate


def record(updates: int = 6, plugins: Any = (), **options: Any) -> Record:
    made = Record()
    fit_tiny([*plugins, Witness(made, updates)], **options)
    return made


def kinds(made: Record, update: int) -> list[str]:
    return list(dict.fromkeys(mark.kind for mark in made.marks if mark.update == update and not mark.aside))


def names(made: Record, kind: str, update: int = 1) -> list[str]:
    return [mark.path for mark in made.marks if (mark.update, mark.kind) == (update, kind)]


def test_an_update_is_written_down_causes_before_effects() -> None:
    made = record()
    assert kinds(made, 0) == [WEIGHTS]
    assert kinds(made, 1) == [BATCH, NUMBERS_BEFORE, OUTPUTS, LOSS, GRADIENTS, WEIGHTS, OPTIMIZER, NUMBERS]
    assert names(made, BATCH) == ["micro-batch 0, part 0", "micro-batch 0, part 1"]
    assert names(made, OUTPUTS)[:5] == [f"net.{i}" for i in range(5)]
    assert names(made, GRADIENTS)[0] == "net.4.bias"  # the last: a backward pass comes to it first


def test_the_run_ends_after_its_updates_and_is_not_changed() -> None:
    plain, _ = fit_tiny([], max_updates=4)
    task, result = fit_tiny([Witness(Record(), 4)])
    assert result.updates == 4
    assert_same(task, plain)
    assert not any(part._forward_hooks for part in task.modules())


def test_two_equal_runs_leave_equal_records() -> None:
    one, other, third = (record(seed=seed) for seed in (0, 0, 1))
    assert set(one.updates) == set(range(7))
    assert first_difference(one, other) is None
    found = first_difference(one, third)
    assert found is not None
    assert (found.update, found.kind) == (1, NUMBERS_BEFORE)


@pytest.mark.parametrize("task", [TinyGAN, TinyTask])
def test_several_optimizers_are_written_down_turn_by_turn(task: Any) -> None:
    one, other = (record(plugins=[Accumulate(2)], task=task()) for _ in "ab")
    assert first_difference(one, other) is None
    turns = [""] if task is TinyTask else ["generator, ", "discriminator, "]
    assert names(one, LOSS) == [f"{turn}micro-batch {i}" for turn in turns for i in range(2)]


def test_an_optimizer_that_asks_again_is_followed() -> None:
    class Closure(TinyTask):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=2)

    one, other = (record(2, task=Closure()) for _ in "ab")
    assert first_difference(one, other) is None
    assert len(names(one, LOSS)) > 1


def test_no_hook_is_put_on_what_is_compiled() -> None:
    task = TinyTask()
    task.get_submodule("net.3").compile(backend="eager")
    made = record(1, task=task)
    assert not names(made, OUTPUTS)
    assert names(made, LOSS)
