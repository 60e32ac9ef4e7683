"""A loss whose mean over ranks is not the loss of the whole batch is told at the first batch; no other one is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.data import Loader
from forge_cluster.zero import Zero
from forge_plugins import DDP, FSDP
from tests.support.lasting_ranks import ranks

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

    def training_step(self, batch: Any) -> Tensor:
        tokens, labels = batch
        self.seen.append(len(tokens))
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


STRATEGIES = {"ddp": DDP, "zero": Zero, "fsdp": FSDP}


def said(task: type[Texts], strategy: str = "ddp") -> tuple[list[str], list[int]]:
    """The warnings of a short fit, and what the task saw of it."""
    made = task()
    trainer = forge.Trainer(plugins=[STRATEGIES[strategy]()], max_updates=2, seed=0, device="cpu", run_dir=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(made, Loader(texts(), 16))
    return [str(each.message) for each in caught if "not over samples" in str(each.message)], made.seen


@pytest.mark.parametrize(
    ("task", "strategy"),
    [(Texts, "ddp"), (Texts, "zero"), (Texts, "fsdp"), (Weighted, "ddp"), (Penalised, "ddp")],
)
def test_a_mean_over_something_else_than_samples_is_told_with_the_cure(task: Any, strategy: str) -> None:
    for heard, seen in ranks(2)(said, task, strategy):
        assert len(heard) == 1
        assert heard[0].startswith("cross_entropy averages over")
        assert "(labels != -100).sum()" in heard[0]
        assert seen == [8, 8], "the step runs as often as without the check"


@pytest.mark.parametrize("task", [Counted, Mean, PerText])
def test_no_other_loss_is_told(task: Any) -> None:
    for heard, _ in ranks(2)(said, task):
        assert heard == []


def test_one_process_is_told_nothing() -> None:
    made = Texts()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forge.Trainer(plugins=[], max_updates=1, seed=0, device="cpu", run_dir=False).fit(made, Loader(texts(), 16))
