"""A fit trains in train mode; what the task put into eval mode and does not train stays there."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge_plugins import Freeze
from tests.forge.snapshot.test_resume import resumes
from tests.support.tasks import fit, make_batches


def body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))


class Distils(forge.TaskModule):
    """A student that learns from a frozen teacher in eval mode."""

    def __init__(self, arrange: Callable[[Any], object] | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.teacher, self.student, self.head = body(), body(), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)
        self.seen: list[set[str]] = []
        (arrange or sleeping_teacher)(self)

    def training_step(self, batch: Any) -> Any:
        self.seen.append({name for name, module in self.named_modules() if not module.training})
        x, y = batch
        hidden = self.student(x)
        return F.cross_entropy(self.head(self.drop(hidden)), y) + (hidden - self.teacher(x).detach()).square().mean()

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.student.parameters(), *self.head.parameters()], lr=0.1)


def sleeping_teacher(task: Distils) -> None:
    task.teacher.requires_grad_(False).eval()


TEACHER = {"teacher", "teacher.0", "teacher.1", "teacher.2"}


def asleep_in_fit(arrange: Callable[[Any], object], **options: Any) -> set[str]:
    """The modules in eval mode in the training steps; evaluations do not change them."""
    task = Distils(arrange)
    fit(task, make_batches(3), make_batches(2), validate_every="1 update", **options)
    trained = [names for names in task.seen if "" not in names]
    assert len(trained) == 3
    assert all(names == trained[0] for names in trained)
    return trained[0]


def test_a_frozen_teacher_gives_the_weights_of_a_plain_loop() -> None:
    task = Distils()
    plain = copy.deepcopy(task)
    fit(task, make_batches(4), make_batches(2), seed=5, validate_every="2 updates")

    forge.seed(5)
    plain.train()
    plain.teacher.eval()
    optimizer = plain.configure_optimizers()
    for batch in make_batches(4):
        plain.training_step(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(task.state_dict().values(), plain.state_dict().values(), strict=True))
    assert task.teacher[1].num_batches_tracked == 0


@pytest.mark.parametrize(
    ("arrange", "expected"),
    [
        (sleeping_teacher, TEACHER),
        (lambda task: task.teacher.eval(), TEACHER),  # in no optimizer
        (lambda task: task.drop.eval(), {"drop"}),
        (lambda task: task.eval(), TEACHER),  # the task was evaluated before
        (lambda task: task.student.eval(), set()),  # a pretrained network: its dropout drops
        (lambda task: (task.student.eval(), task.student[1].requires_grad_(False)), {"student.1"}),
        (lambda task: task.student[1].eval(), set()),
        (lambda task: (task.teacher.eval(), task.teacher[2].train()), TEACHER - {"teacher.2"}),
        (lambda task: task.student[2].eval(), {"student.2"}),
        (lambda task: None, set()),
    ],
)
def test_what_is_in_eval_mode_and_not_trained_stays(arrange: Callable[[Any], object], expected: set[str]) -> None:
    assert asleep_in_fit(arrange) == expected


def test_a_train_of_the_tasks_own_is_asked() -> None:
    class Stubborn(nn.Sequential):
        calls: list[bool]

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.calls.append(mode)
            self[1].eval()
            return self

    def arrange(task: Distils) -> None:
        sleeping_teacher(task)
        task.student = Stubborn(*task.student)
        task.student.calls = []

    assert asleep_in_fit(arrange) == TEACHER | {"student.1"}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "In eval mode" in line]


def test_one_note_says_what_is_woken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "forge"):
        asleep_in_fit(lambda task: task.student.eval())
    (line,) = told(caplog)
    assert line.startswith("In eval mode, with parameters that are trained: student. forge trains in train mode.")
    caplog.clear()
    with caplog.at_level(logging.INFO, "forge"):
        asleep_in_fit(sleeping_teacher)
    assert not told(caplog)


def test_what_freeze_freezes_sleeps_until_it_is_thawed() -> None:
    class Fresh(Distils):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    task = Fresh(lambda task: task.teacher.eval())
    fit(task, make_batches(4), plugins=[Freeze(modules="teacher", thaw="2 updates")])
    assert task.seen == [TEACHER, TEACHER, set(), set()]


def test_a_resumed_run_has_the_modes(tmp_path: Path) -> None:
    made: list[Distils] = []

    def given() -> dict[str, Any]:
        made.append(Distils())
        return {"task": made[-1], "train": make_batches(4), "validate_every": None, "max_epochs": 2}

    resumes(tmp_path, given, lambda updates: [3])
    assert made[-1].seen[-1] == TEACHER
