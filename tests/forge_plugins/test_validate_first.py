"""validate_first with `batches`, as in the recipe default: a mistake in validation shows before the first update."""

from __future__ import annotations

import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import forge
from forge_plugins import DDP, Checkpoint, ValidateFirst
from tests.support.lasting_ranks import ranks
from tests.support.tasks import Classifier, fit, make_batches


class Seen(Classifier):
    """What happens, in order."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.seen: list[str] = []

    def training_step(self, batch: Any) -> Any:
        self.seen.append("train")
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        self.seen.append("val")
        return super().training_step(batch)

    def evaluation_end(self, stage: str) -> Any:
        self.seen.append("end")


class Misspelt(Seen):
    def validation_step(self, batch: Any) -> Any:
        return {"loss": undefined_name}  # pyright: ignore[reportUndefinedVariable]  # noqa: F821


def test_the_recipe_default_tries_one_batch_before_the_first_update(tmp_path: Path) -> None:
    task = Misspelt()
    trainer = forge.Trainer(max_epochs=1, run_dir=tmp_path)
    with pytest.raises(NameError, match="undefined_name") as caught:
        trainer.fit(task, make_batches(4), make_batches(2))
    assert task.seen == []
    assert trainer.progress.update == 0
    notes = "\n".join(caught.value.__notes__)
    assert "Misspelt.validation_step, in validation after update 0, batch 1" in notes
    assert "the check before training, on one batch of each val loader" in notes


def test_one_batch_of_each_loader_runs_and_ends_as_a_validation() -> None:
    task = Seen()
    fit(task, make_batches(2), {"a": make_batches(3), "b": make_batches(3)}, plugins=[ValidateFirst(batches=1)])
    assert task.seen == ["val", "val", "end", "train", "train", *["val"] * 6, "end"]


class Counts(Sampler[int]):
    """An order that depends on how often it was asked for, and on a generator."""

    def __init__(self) -> None:
        self.passes, self.generator = 0, torch.Generator().manual_seed(3)

    def __iter__(self) -> Any:
        self.passes += 1
        shift = int(torch.randint(8, (), generator=self.generator))
        return iter((i + self.passes + shift) % 8 for i in range(8))

    def __len__(self) -> int:
        return 8


class Remembers(Seen):
    """Everything that a validation may move, and what each validation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=3)
        self.register_buffer("count", torch.zeros(()))
        self.own, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.drop = nn.Dropout(0.5)
        self.given: list[list[Any]] = []
        self.now: list[Any] = []
        self.cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.ones(8)  # as position encodings are made
        return self.net(self.drop(x) * self.cache)

    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        self.count += 1
        self.accuracy.update(self(x), y)
        noise = torch.rand(()) + torch.rand((), generator=self.own) + self.numpy.random() + float(np.random.rand())
        assert self.trainer is not None
        self.now.append((self.trainer.evaluated, x.sum().item(), float(self.count)))
        return {"noise": noise, "accuracy": self.accuracy}

    def evaluation_end(self, stage: str) -> Any:
        self.given.append(self.now)
        self.now = []


def test_the_run_goes_on_as_if_it_had_not_been() -> None:
    data = TensorDataset(torch.randn(8, 8, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 3)
    ended: list[Any] = []
    for plugins in ([], [ValidateFirst(batches=1)]):
        task = Remembers()
        val = DataLoader(data, batch_size=4, sampler=Counts())
        options: dict[str, Any] = {"seed": 3, "plugins": plugins, "max_epochs": 2, "validate_every": "2 updates"}
        result = fit(task, make_batches(4), val, **options)
        ended.append((task.given[-4:], result.metrics, task.state_dict()))
        assert len(task.given) == 4 + len(plugins)
    (given, metrics, weights), (given_too, metrics_too, weights_too) = ended
    assert given == given_too
    assert metrics == metrics_too
    assert all(torch.equal(weights[name], weights_too[name]) for name in weights)


def test_an_end_that_needs_more_batches_is_only_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Needs(Seen):
        def evaluation_end(self, stage: str) -> Any:
            super().evaluation_end(stage)
            if self.seen.count("val") < 3:
                raise ValueError("only one class")

    task = Needs()
    with caplog.at_level(logging.WARNING, "forge"):
        fit(task, make_batches(1), make_batches(2), plugins=[ValidateFirst(batches=1)])
    assert task.seen == ["val", "end", "train", "val", "val", "end"]
    assert any("failed after its batches: ValueError: only one class" in line for line in caplog.messages)


class Stateful:
    """A loader that goes on where it was, by its state."""

    def __init__(self) -> None:
        self.at = [0]

    def __iter__(self) -> Any:
        while self.at[0] < 4:
            self.at[0] += 1
            yield make_batches(4)[self.at[0] - 1]
        self.at[0] = 0

    def state_dict(self) -> Any:
        return {"at": self.at[0]}

    def load_state_dict(self, state: Any) -> None:
        self.at[0] = state["at"]


def test_a_loader_with_a_state_is_put_back() -> None:
    task = Seen()
    fit(task, make_batches(1), Stateful(), plugins=[ValidateFirst(batches=1)])
    assert task.seen == ["val", "end", "train", *["val"] * 4, "end"]


def test_no_worker_is_left() -> None:
    left: list[int] = []

    class Counted(Seen):
        def training_step(self, batch: Any) -> Any:
            left.append(len(multiprocessing.active_children()))
            return super().training_step(batch)

    data = TensorDataset(torch.randn(8, 8), torch.arange(8) % 3)
    val = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
    fit(Counted(), make_batches(2), val, max_epochs=2, plugins=[ValidateFirst(batches=1)])
    assert left[0] == left[1] == 0


def test_a_resumed_run_is_not_checked_again(tmp_path: Path) -> None:
    def run(task: Any, **options: Any) -> Any:
        plugins = [ValidateFirst(batches=1), Checkpoint(every="1 update")]
        forge.Trainer(plugins=plugins, run_dir=tmp_path, resume="auto", **options).fit(
            task, make_batches(3), make_batches(1)
        )
        return task

    assert run(Seen(), max_updates=2).seen == ["val", "end", "train", "train"]
    assert run(Seen(), max_epochs=1).seen == ["train", "val", "end"]


def on_ranks() -> tuple[list[str], list[float]]:
    task, plugins = (
        Seen(),
        [ValidateFirst(batches=1)] if "RANK" not in os.environ else [DDP(), ValidateFirst(batches=1)],
    )
    forge.Trainer(max_epochs=1, seed=1, plugins=plugins, run_dir=False, device="cpu").fit(
        task, make_batches(2), {"a": make_batches(2), "b": make_batches(1)}
    )
    return task.seen, next(task.parameters()).flatten().tolist()


def test_all_ranks_try_the_same() -> None:
    seen, weights = on_ranks()
    assert seen == ["val", "val", "end", "train", "train", "val", "val", "val", "end"]
    for theirs, same in ranks(2)(on_ranks):
        assert theirs == seen
        assert torch.allclose(torch.tensor(same), torch.tensor(weights), atol=1e-6)


def test_a_lightning_module_is_told_that_it_is_a_sanity_check() -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.heard = nn.Linear(8, 3), []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.heard.append((batch_idx, self.trainer.sanity_checking))
            self.log("val_loss", self.training_step(batch, batch_idx))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    fit(forge.LightningAdapter(module), make_batches(2), make_batches(2), plugins=[ValidateFirst(batches=1)])
    assert module.heard == [(0, True), (0, False), (1, False)]
