"""Memory that grows is named in a plain fit, wherever it is held, from whichever update on; what has an end is not."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import forge
from forge_doctor import memory
from forge_doctor.memory import KeptGraphs
from tests.support.patients import Healthy, loader, said

BATCH, EPOCH, EVERY = 16, 8, 6
"""Samples of a batch, batches of an epoch, updates between logs."""
IN_GLOBAL: list[Any] = []


class Holder:
    kept: list[Any] = []


def closure() -> Any:
    kept: list[Any] = []

    def keep(x: Any) -> None:
        kept.append(x)

    return keep


class Keeps(Healthy):
    """Does something in every step after those of a range."""

    def __init__(self, how: Callable[[Keeps, Tensor, Tensor], Any], begin: int = 0) -> None:
        super().__init__()
        self.how, self.before, self.count = how, range(begin), 0
        self.losses, self.total, self.by_name = deque[Any](), torch.zeros(()), dict[Any, Any]()
        self.history, self.recent = list[Any](), deque[Any](maxlen=12)
        self.seen, self.averaged, self.warm_up = torch.zeros(0), torch.zeros(()), 1000
        self.elsewhere = SimpleNamespace(kept={})
        self.append = closure()
        IN_GLOBAL.clear()
        Holder.kept.clear()

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        scores = self(x)
        loss = self.loss(scores, y)
        self.count += 1
        if self.count not in self.before:
            self.how(self, loss, scores)
        return loss

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        return self.optimizer


class Buffer:
    """A list that is written over once it is full."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.items, self.at = capacity, list[Any](), 0

    def push(self, item: Any) -> None:
        if len(self.items) < self.capacity:
            self.items.append(item)
        self.items[self.at % self.capacity] = item
        self.at += 1


class Replays(Keeps):
    def __init__(self, how: Any) -> None:
        super().__init__(how)
        self.buffer = Buffer(10_000)


def adds_up(task: Keeps, loss: Tensor, scores: Tensor) -> None:
    task.total = task.total + loss


def joins(task: Keeps, loss: Tensor, scores: Tensor) -> None:
    task.seen = torch.cat([task.seen, scores.detach().flatten().repeat(8)])


def follows(task: Keeps, loss: Tensor, scores: Tensor) -> None:
    """An average of weights with a graph that is no part of any loss."""
    task.averaged = 0.9 * task.averaged + 0.1 * task.net[0].weight


def copies(task: Keeps, loss: Tensor, scores: Tensor) -> None:
    if task.count < task.warm_up:
        task.history.append((loss.item(), {name: p.detach().clone() for name, p in task.named_parameters()}))


def grows(task: Keeps, loss: Tensor, scores: Tensor) -> None:
    task.net.append(nn.Identity())


GRAPHS = {
    "list": lambda task, loss, scores: task.history.append(loss),
    "deque": lambda task, loss, scores: task.losses.append(loss),
    "outputs": lambda task, loss, scores: task.history.append(scores),
    "by number": lambda task, loss, scores: task.by_name.update({len(task.by_name): loss}),
    "in a tuple": lambda task, loss, scores: task.history.append((len(task.history), {"loss": loss})),
    "sum": adds_up,
    "average of weights": follows,
    "global": lambda task, loss, scores: IN_GLOBAL.append(loss),
    "on a class": lambda task, loss, scores: Holder.kept.append(loss),
    "closure": lambda task, loss, scores: task.append(scores),
    "partial": lambda task, loss, scores: task.history.append(functools.partial(torch.add, loss)),
    "another object": lambda task, loss, scores: task.elsewhere.kept.update({len(task.elsewhere.kept): scores}),
    "a part of one": lambda task, loss, scores: task.losses.append(scores[0, 0] * 2),
}
GROWTH = {
    "detached outputs": lambda task, loss, scores: task.history.append(scores.detach().repeat(1, 8)),
    "arrays": lambda task, loss, scores: task.losses.append(scores.detach().numpy().copy().repeat(8)),
    "joined": joins,
    "one row of each batch": lambda task, loss, scores: task.history.append(torch.zeros(BATCH, 16)[0]),
    "copies of the weights": copies,
    "rows by number": lambda task, loss, scores: task.by_name.update({task.count: torch.zeros(BATCH, 16)}),
    "zeros in a global": lambda task, loss, scores: IN_GLOBAL.append(torch.zeros(BATCH, 16)),
    "hooks": lambda task, loss, scores: task.net.register_forward_hook(lambda *given: None),
    "modules": grows,
    "groups": lambda task, loss, scores: task.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
}
LEFT = {
    "detached": lambda task, loss, scores: task.history.append(loss.detach()),
    "numbers": lambda task, loss, scores: task.losses.append(loss.item()),
    "of each sample": lambda task, loss, scores: task.history.append(scores.detach().amax(1)),
    "the last": lambda task, loss, scores: setattr(task, "total", loss),
    "the latest few": lambda task, loss, scores: task.recent.append(scores.detach()),
    "the latest few, with graphs": lambda task, loss, scores: setattr(task, "history", [*task.history[-2:], loss]),
    "a running mean": lambda task, loss, scores: task.total.mul_(0.9).add_(loss.detach(), alpha=0.1),
    "a cache": lambda task, loss, scores: task.by_name.update({task.count % EPOCH: scores.detach()}),
    "until the epoch ends": lambda task, loss, scores: (
        task.history.append(scores.detach()) if task.count % EPOCH else task.history.clear()
    ),
    "in a full table": lambda task, loss, scores: task.by_name.update({task.count % 3: np.zeros(9999)}),
}


def told(task: forge.TaskModule, updates: int = 60) -> list[str]:
    """What a plain fit says."""
    x = torch.randn(BATCH * EPOCH, 8, generator=torch.Generator().manual_seed(0))
    return said(task, loader(x, torch.arange(len(x)) % 4), max_updates=updates, max_epochs=None, log_every=EVERY)


@pytest.mark.parametrize("where", [*GRAPHS, *GROWTH])
def test_what_grows_is_named_within_two_intervals(where: str) -> None:
    assert "memory_grows" in told(Keeps((GRAPHS | GROWTH)[where], begin=20), 20 + 3 * EVERY)


@pytest.mark.parametrize("where", ["list", "joined"])
def test_what_grows_from_the_first_update_on_is_named_too(where: str) -> None:
    assert "memory_grows" in told(Keeps((GRAPHS | GROWTH)[where]), 4 * EVERY)


@pytest.mark.parametrize("what", LEFT)
def test_what_has_an_end_is_left_in_peace(what: str) -> None:
    assert told(Keeps(LEFT[what])) == []


def test_a_buffer_that_knows_its_capacity_is_left_in_peace() -> None:
    assert told(Replays(lambda task, loss, scores: task.buffer.push(torch.zeros(BATCH, 16)))) == []


@pytest.mark.parametrize(("how", "where"), [("deque", "Keeps.losses"), ("sum", "Keeps.total"), ("closure", "closure")])
def test_what_holds_a_graph_is_named(how: str, where: str) -> None:
    task, marks = Keeps(GRAPHS[how]), KeptGraphs()
    for _ in range(2):
        marks.put(task.training_step((torch.randn(4, 8), torch.tensor([0, 1, 2, 3]))))
    (finding,) = marks.found()
    assert where in finding.where
    assert list(marks.found()) == []


def test_later_looks_take_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(memory, "LOOKS", 3)
    monkeypatch.setattr(memory, "SHARE", 0.0)
    monkeypatch.setattr(memory, "held_by", lambda trainer, before: looks.append(trainer.progress.update) or {})
    told(Keeps(LEFT["numbers"]), 20 * EVERY)
    assert len(looks) in (3, 4)
