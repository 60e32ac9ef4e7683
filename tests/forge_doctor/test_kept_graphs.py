"""Graphs that outlive their updates are named in a plain fit, wherever they are kept."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_doctor.kept_graphs import KeptGraphs
from tests.support.patients import Healthy, said

IN_GLOBAL: list[Tensor] = []


def closure() -> Any:
    kept: list[Tensor] = []

    def keep(x: Tensor) -> None:
        kept.append(x)

    return keep


class Keeps(Healthy):
    """Keeps something of every step; `how` does it."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how
        self.losses, self.total = deque[Any](), torch.zeros(())
        self.elsewhere = SimpleNamespace(kept={})
        self.append = closure()

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        scores = self(x)
        loss = self.loss(scores, y)
        self.how(self, loss, scores)
        return loss


def adds_up(task: Keeps, loss: Tensor, scores: Tensor) -> None:
    task.total = task.total + loss


KEPT = {
    "deque": lambda task, loss, scores: task.losses.append(loss),
    "sum": adds_up,
    "global": lambda task, loss, scores: IN_GLOBAL.append(loss),
    "closure": lambda task, loss, scores: task.append(scores),
    "another object": lambda task, loss, scores: task.elsewhere.kept.update({len(task.elsewhere.kept): scores}),
}
LEFT = {
    "detached": lambda task, loss, scores: task.losses.append(loss.detach()),
    "numbers": lambda task, loss, scores: task.losses.append(loss.item()),
    "the last": lambda task, loss, scores: setattr(task, "total", loss),
}


@pytest.mark.parametrize("where", KEPT)
def test_a_kept_graph_is_named(where: str) -> None:
    IN_GLOBAL.clear()
    assert "memory_grows" in said(Keeps(KEPT[where]), max_epochs=6, log_every=16)
    IN_GLOBAL.clear()


@pytest.mark.parametrize("what", LEFT)
def test_what_has_no_graph_or_is_let_go_of_is_left_in_peace(what: str) -> None:
    assert said(Keeps(LEFT[what]), max_epochs=6, log_every=16) == []


@pytest.mark.parametrize(("how", "where"), [("deque", "Keeps.losses"), ("sum", "Keeps.total"), ("closure", "closure")])
def test_what_holds_a_graph_is_named(how: str, where: str) -> None:
    task, marks = Keeps(KEPT[how]), KeptGraphs()
    for _ in range(2):
        marks.put(task.training_step((torch.randn(4, 8), torch.tensor([0, 1, 2, 3]))))
    (finding,) = marks.found()
    assert where in finding.where
    assert list(marks.found()) == []
