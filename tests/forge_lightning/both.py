"""One LightningModule under Lightning's Trainer and under forge, and what can be compared of the two runs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

HOOKS = (
    "setup",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "teardown",
)


def numbers(count: int, width: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    return x, (x.sum(1, keepdim=True) > 0).float()


def loader(count: int = 18, batch_size: int = 4, seed: int = 0) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*numbers(count, seed=seed)), batch_size=batch_size)


class Subject(L.LightningModule):
    """Dropout in training, random numbers in validation, and a record of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.heard: list[Any] = []
        self.rates: list[float] = []
        self.final: dict[str, float] = {}

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch) * (1 + torch.rand(())))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)

    def on_train_end(self) -> None:
        self.final = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.heard.append(("end", self.trainer.current_epoch, self.trainer.global_step))


def hearing(kind: type[Any]) -> type[Any]:
    """A subclass that records each of Lightning's hooks with the epoch and the step."""

    def hook(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            indices = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, (int, str))]
            self.heard.append((name, self.current_epoch, self.global_step, *indices))
            return getattr(super(made, self), name)(*args, **kwargs)

        return method

    made = type(kind.__name__, (kind,), {name: hook(name) for name in HOOKS})
    return made


@dataclass
class Scenario:
    """What differs from a plain fit of three epochs with validation."""

    kind: type[Any] = Subject
    lightning: dict[str, Any] = field(default_factory=dict)
    "Options of Lightning's Trainer."
    forge: Callable[[], dict[str, Any]] = dict
    "The same for forge's Trainer."
    callbacks: Callable[[Path], list[Any]] = lambda folder: []
    train: Callable[[], Any] = loader
    val: Callable[[], Any] = lambda: loader(10, seed=1)
    datamodule: Callable[[], Any] | None = None


@dataclass
class Outcome:
    weights: dict[str, Tensor]
    heard: list[Any]
    rates: list[float]
    final: dict[str, float]
    callbacks: list[Any]
    files: list[str]


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    return make()


def lightning_trainer(**options: Any) -> L.Trainer:
    """Lightning's own Trainer, which trains three epochs and shows and writes nothing."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(**{"max_epochs": 3, "num_sanity_val_steps": 0, "accelerator": "cpu", **quiet, **options})


def forge_trainer(**options: Any) -> forge.Trainer:
    """forge's Trainer, for the same."""
    settings = {"max_epochs": 3, "seed": 7, "plugins": [], "run_dir": False, "device": "cpu"}
    return forge.Trainer(**{**settings, **options})


def outcome(module: Any, callbacks: list[Any], folder: Path) -> Outcome:
    files = sorted(path.name for path in folder.rglob("*.ckpt"))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return Outcome(weights, module.heard, module.rates, module.final, callbacks, files)


def by_lightning(scenario: Scenario, folder: Path) -> Outcome:
    module, callbacks = made(scenario.kind), scenario.callbacks(folder)
    kept = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    options = {"enable_checkpointing": kept, **scenario.lightning}
    trainer = lightning_trainer(**options, callbacks=callbacks, default_root_dir=folder)
    data = {"datamodule": scenario.datamodule()} if scenario.datamodule is not None else {}
    loaders = () if data else (scenario.train(), scenario.val())
    L.seed_everything(7, verbose=False)
    trainer.fit(module, *loaders, **data)
    return outcome(module, callbacks, folder)


def by_forge(scenario: Scenario, folder: Path) -> Outcome:
    module, callbacks = made(scenario.kind), scenario.callbacks(folder)
    datamodule = None if scenario.datamodule is None else scenario.datamodule()
    task = forge.LightningAdapter(module, datamodule, callbacks)
    if datamodule is not None:
        loaders = task.train_loader(), task.val_loader()
    else:
        loaders = scenario.train(), scenario.val()
    if isinstance(loaders[1], list):
        loaders = loaders[0], {str(i): each for i, each in enumerate(loaders[1])}
    forge_trainer(**scenario.forge()).fit(task, *loaders)
    return outcome(module, callbacks, folder)


def assert_alike(scenario: Scenario, folder: Path) -> tuple[Outcome, Outcome]:
    """Run both and assert that weights, hooks, rates, metrics, callbacks' states and files are the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("theirs", "ours"):
            (folder / name).mkdir()
        theirs, ours = by_lightning(scenario, folder / "theirs"), by_forge(scenario, folder / "ours")
    assert ours.heard == theirs.heard
    assert ours.rates == theirs.rates
    assert ours.weights.keys() == theirs.weights.keys()
    for name, value in theirs.weights.items():
        assert torch.equal(ours.weights[name], value), name
    assert {name: ours.final.get(name) for name in theirs.final} == pytest.approx(theirs.final, rel=1e-5, abs=1e-7)
    assert ours.files == theirs.files
    return theirs, ours
