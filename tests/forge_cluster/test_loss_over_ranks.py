"""A loss whose mean over ranks is not the loss of the whole batch is told in the first update; no other one is."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.data import Loader
from forge.distributed.loss_over_ranks import _kind_of
from forge_cluster.zero import Zero
from forge_plugins import DDP, FSDP
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some

LENGTH, CLASSES = 6, 5


def texts(count: int = 32) -> list[Any]:
    """Tokens, and labels of which each text has another number that counts."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(CLASSES, (count, LENGTH), generator=generator)
    labels = tokens.flip(1).clone()
    for i in range(count):
        labels[i, 1 + i * 7 % LENGTH :] = -100
    return list(zip(tokens, labels, strict=True))


class Texts(forge.TaskModule):
    """The mean over tokens that count, by `ignore_index`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(CLASSES, 8), nn.Dropout(0.2), nn.Linear(8, CLASSES))
        self.seen: list[int] = []
        self.calls = 0

    def training_step(self, batch: Any) -> Tensor:
        tokens, labels = batch
        self.seen.append(len(tokens))
        self.calls += 1
        return self.loss(self.net(tokens), labels)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Weighted(Texts):
    """A mean over weights of classes."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, 0], labels[:, 0], torch.arange(1.0, CLASSES + 1))


class Penalised(Texts):
    """With a term that no count divides."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + 0.1 * self.net.get_parameter("2.weight").square().sum()


class Sum(Texts):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, 0], labels[:, 0], reduction="sum")


class Counted(Texts):
    """With the cure."""

    def num_items(self, batch: Any) -> Tensor:
        return (batch[1] != -100).sum()


class Mean(Texts):
    """A mean over samples."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, 0], labels[:, 0])


class PerText(Texts):
    """Every text counts as much, however many tokens of it count."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (each.sum(1) / (labels != -100).sum(1)).mean()


class Statistics(Mean):
    """BatchNorm: in training a sample depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(CLASSES, 8), nn.BatchNorm1d(LENGTH), nn.Linear(8, CLASSES))


class Contrastive(Texts):
    """Each sample against all others of the batch: no mean at all."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        flat = logits.flatten(1)
        return F.cross_entropy(flat @ flat.T, torch.arange(len(flat)))


class Noisy(Texts):
    """Draws in its step, as diffusion does."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (logits + torch.randn_like(logits)).square().mean()


class Bare(Texts):
    """Can only be called as a whole batch."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if len(logits) != 8:
            raise ValueError("eight samples, please")
        return super().loss(logits, labels)


STRATEGIES = {"ddp": DDP, "zero": Zero, "fsdp": FSDP}


def said(task: type[Texts], strategy: str = "ddp", batch: int = 16) -> tuple[list[str], list[int]]:
    """The warnings of a short fit, and what the task saw of it."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("forge").addHandler(handler)
    made = task()
    plugins = [STRATEGIES[strategy]()]
    try:
        forge.Trainer(plugins=plugins, max_updates=2, seed=0, device="cpu", run_dir=False).fit(
            made, Loader(texts(), batch)
        )
    finally:
        logging.getLogger("forge").removeHandler(handler)
    assert made.calls == len(made.seen)
    assert made.training
    return [each for each in heard if "its loss" in each], made.seen


@pytest.mark.parametrize(
    ("task", "strategy"),
    [(Texts, "ddp"), (Texts, "zero"), (Texts, "fsdp"), (Weighted, "ddp"), (Penalised, "ddp")],
)
def test_a_mean_over_something_else_than_samples_is_told_with_the_cure(task: Any, strategy: str) -> None:
    (first, seen), (second, _) = ranks(2)(said, task, strategy)
    assert len(first) == 1
    assert first[0].startswith(f"{strategy}: {task.__name__} averages its loss over something else than samples")
    assert "(labels != -100).sum()" in first[0]
    assert second == []
    assert seen == [8, 8]  # nothing of the comparison is left


def test_one_sample_per_rank_is_compared_with_those_of_other_ranks() -> None:
    (first, seen), (second, _) = ranks(2)(said, Texts, "ddp", 2)
    assert len(first) == 1
    assert second == []
    assert seen == [1, 1]


def test_a_sum_is_told() -> None:
    (first, _), _ = ranks(2)(said, Sum)
    assert len(first) == 1
    assert "adds its loss up over the samples" in first[0]


@pytest.mark.parametrize("task", [Counted, Mean, PerText, Statistics, Contrastive, Noisy, Bare])
def test_no_other_loss_is_told(task: Any) -> None:
    for heard, seen in ranks(2)(said, task):
        assert heard == []
        assert seen == [8, 8]


def weights(task: type[Texts], looks: bool) -> list[Tensor]:
    made = type(task.__name__, (task,), {"check_first_batch": looks})()
    plugins = [DDP()]
    forge.Trainer(plugins=plugins, max_updates=2, seed=0, device="cpu", run_dir=False).fit(made, Loader(texts(), 16))
    return [*made.state_dict().values(), torch.get_rng_state(), torch.tensor(made.calls)]


@pytest.mark.parametrize("task", some([Noisy, Texts, Statistics]))
def test_the_comparison_leaves_no_trace(task: Any) -> None:
    for looked, left in zip(ranks(2)(weights, task, True), ranks(2)(weights, task, False), strict=True):
        assert all(map(torch.equal, looked, left))


def test_losses_that_are_no_weighted_mean_are_not_told() -> None:
    alone = {(0,): 1.0, (1,): 2.0, (2,): 3.0}
    right = {**alone, (0, 1): 1.5, (1, 2): 2.5, (0, 2): 2.0, (0, 1, 2): 2.0}
    counted = {**alone, (0, 1): 5 / 3, (1, 2): 8 / 3, (0, 2): 13 / 5, (0, 1, 2): 17 / 7}
    assert _kind_of(right, 1e-6) is None
    assert "1 : 2 : 4" in (_kind_of(counted, 1e-6) or "")
    assert _kind_of({**counted, (0, 1, 2): 2.2}, 1e-6) is None
    assert _kind_of({**right, (0, 1, 2): 2.001}, 1e-6) is None
