"""Scenarios of Lightning's behaviour, by name: each runs under both Trainers, and the outcomes are compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.optim import SGD, Adam
from torch.optim import lr_scheduler as lr
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from forge_plugins import Accumulate, Clip
from tests.forge_lightning.both import Scenario, Subject, hearing, loader, numbers

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr.StepLR(o, 2, 0.5),
    "exponential": lambda o: lr.ExponentialLR(o, 0.8),
    "onecycle": lambda o: lr.OneCycleLR(o, 0.05, total_steps=20),
    "cyclic": lambda o: lr.CyclicLR(o, 0.001, 0.02, 2, cycle_momentum=False),
    "sequential": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o, 0.1, 2), lr.ExponentialLR(o, 0.9)], [2]),
}


def scheduled(make: Any, **config: Any) -> type[Any]:
    class Scheduled(Subject):
        def configure_optimizers(self) -> Any:
            optimizer = Adam(self.parameters(), lr=0.02)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **config}}

    return Scheduled


def schedules() -> dict[str, Scenario]:
    """Every kind by step and by epoch, and one of them less often."""
    grid = [*itertools.product(SCHEDULERS, ("step", "epoch"), (1,)), ("step", "step", 3), ("step", "epoch", 2)]
    found = {
        f"schedule-{name}-{interval}-{frequency}": Scenario(
            scheduled(SCHEDULERS[name], interval=interval, frequency=frequency)
        )
        for name, interval, frequency in grid
    }
    for window in (2, 3):
        found[f"schedule-accumulated-{window}"] = Scenario(
            scheduled(SCHEDULERS["exponential"], interval="step"),
            {"accumulate_grad_batches": window},
            lambda window=window: {"plugins": [Accumulate(window)]},
        )
    return found


def plateaus() -> dict[str, Scenario]:
    found = {}
    for monitor, interval, frequency in itertools.product(
        ("val_loss", "train_loss", "train_loss_epoch"), ("epoch", "step"), (1, 2)
    ):
        kind = scheduled(
            lambda o: lr.ReduceLROnPlateau(o, patience=0, threshold=0.5),
            monitor=monitor, interval=interval, frequency=frequency, strict=False,
        )  # fmt: skip
        found[f"plateau-{monitor}-{interval}-{frequency}"] = Scenario(kind)
    missing = scheduled(lambda o: lr.ReduceLROnPlateau(o, patience=0), monitor="nothing", strict=False)
    found["plateau-missing-not-strict"] = Scenario(missing)
    without = scheduled(lambda o: lr.ReduceLROnPlateau(o, patience=0, threshold=0.5), monitor="train_loss")
    found["plateau-without-validation"] = Scenario(without, val=lambda: None)
    return found


def updates() -> dict[str, Scenario]:
    """Accumulation, clipping and optimizers; the last of five batches is smaller."""
    clips: dict[str, tuple[dict[str, Any], Any]] = {
        "none": ({}, lambda: []),
        "norm": ({"gradient_clip_val": 0.1}, lambda: [Clip(max_norm=0.1)]),
        "value": (
            {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
            lambda: [Clip(max_norm=None, max_value=0.02)],
        ),
    }
    found = {}
    for window, clip, (name, optimizer) in itertools.product(
        (1, 2, 3, 5), clips, {"sgd": lambda p: SGD(p, lr=0.1, momentum=0.9), "adam": lambda p: Adam(p, lr=0.02)}.items()
    ):

        class Optimized(Subject):
            make = staticmethod(optimizer)

            def configure_optimizers(self) -> Any:
                return self.make(self.parameters())

        options, plugins = clips[clip]
        found[f"update-{name}-{window}-{clip}"] = Scenario(
            Optimized,
            {"accumulate_grad_batches": window, **options},
            lambda plugins=plugins, window=window: {
                "plugins": [*plugins(), *([Accumulate(window)] if window > 1 else [])]
            },
        )
    return found


def validations() -> dict[str, Scenario]:
    heard = hearing(Subject)
    even = lambda: loader(16)  # noqa: E731
    return {
        **{
            f"validate-every-{n}-epochs": Scenario(
                heard, {"check_val_every_n_epoch": n}, lambda n=n: {"validate_every": f"{n} epochs"}
            )
            for n in (1, 2, 3)
        },
        **{
            f"validate-every-{n}-of-4-batches": Scenario(
                heard, {"val_check_interval": n}, lambda n=n: {"validate_every": f"{n} updates"}, train=even
            )
            for n in (1, 2, 4)
        },
        **{
            f"validate-every-{n}-batches-of-all": Scenario(
                heard,
                {"val_check_interval": n, "check_val_every_n_epoch": None},
                lambda n=n: {"validate_every": f"{n} updates"},
                train=even,
            )
            for n in (3, 5, 6)
        },
        "no-validation": Scenario(heard, val=lambda: None),
    }


def logging_() -> dict[str, Scenario]:
    found = {}
    for stage, (on_step, on_epoch), reduce in itertools.product(
        ("train", "val"), ((True, False), (False, True), (True, True)), ("mean", "sum", "min", "max")
    ):

        class Logs(Subject):
            options: Any = {"on_step": on_step, "on_epoch": on_epoch, "reduce_fx": reduce}
            where = stage

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if self.where == "train":
                    self.log("value", batch[0].sum() + batch_idx, **self.options)
                return super().training_step(batch, batch_idx)

            def validation_step(self, batch: Any, batch_idx: int) -> Any:
                if self.where == "val":
                    self.log("value", batch[0].sum() + batch_idx, **self.options)
                return super().validation_step(batch, batch_idx)

        steps = "step" * on_step + "epoch" * on_epoch
        found[f"log-{stage}-{steps}-{reduce}"] = Scenario(Logs)
    for hook in (
        *("on_train_epoch_end", "on_validation_epoch_end", "on_validation_end", "on_train_batch_end"),
        *("on_train_epoch_start", "on_before_optimizer_step", "on_validation_batch_end"),
    ):
        found[f"log-in-{hook}"] = Scenario(logs_in(hook))
    found["log-metric-objects"] = Scenario(Metrics)
    found["log-weights-of-batches"] = Scenario(Weighs)
    return found


def logs_in(hook: str) -> type[Any]:
    def method(self: Any, *args: Any) -> None:
        if hook != "on_validation_end":  # where Lightning refuses it
            self.log("noted", float(self.current_epoch + self.global_step))

    return type("LogsInHook", (Subject,), {hook: method})


class Metrics(Subject):
    """Metrics of torchmetrics as objects."""

    def __init__(self) -> None:
        super().__init__()
        self.of_train, self.of_val = MeanMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.of_train(batch[0].mean())
        self.log("train_mean", self.of_train, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.of_val(batch[0].mean())
        self.log("val_mean", self.of_val)
        return super().validation_step(batch, batch_idx)


class Weighs(Subject):
    """Weights of batches that the module gives itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"a": batch_idx, "b": batch[0].mean()}, on_epoch=True, on_step=False, batch_size=batch_idx + 1)
        return super().training_step(batch, batch_idx)


def stops() -> dict[str, Scenario]:
    found = {}
    for patience, mode, delta in itertools.product((1, 2), ("min", "max"), (0.0, 0.2)):
        found[f"stop-{mode}-{patience}-{delta}"] = Scenario(
            hearing(Subject),
            {"max_epochs": 8},
            lambda: {"max_epochs": 8},
            lambda folder, p=patience, m=mode, d=delta: [EarlyStopping("val_loss", patience=p, mode=m, min_delta=d)],
        )
    for name, options in {
        "on-train-metric": {"monitor": "train_loss_epoch", "mode": "max", "patience": 1},
        "after-train-epoch": {"monitor": "val_loss", "mode": "max", "patience": 1, "check_on_train_epoch_end": True},
        "at-threshold": {"monitor": "val_loss", "stopping_threshold": 100.0},
        "when-divergent": {"monitor": "val_loss", "divergence_threshold": 0.0},
        "missing-not-strict": {"monitor": "nothing", "strict": False},
    }.items():
        found[f"stop-{name}"] = Scenario(
            hearing(Subject),
            {"max_epochs": 6},
            lambda: {"max_epochs": 6},
            lambda folder, options=options: [EarlyStopping(**options)],
        )
    hooks = ("on_train_batch_end", "on_train_epoch_end", "on_validation_end")
    for when, val in itertools.product(hooks, (True, False)):
        found[f"stop-by-module-{when}-{'val' if val else 'alone'}"] = Scenario(
            stopping(when), val=(lambda: loader(10, seed=1)) if val else (lambda: None)
        )
    return found


def stopping(hook: str) -> type[Any]:
    def method(self: Any, *args: Any) -> None:
        if self.global_step >= 7:
            self.trainer.should_stop = True

    return hearing(type("Stops", (Subject,), {hook: method}))


def checkpoints() -> dict[str, Scenario]:
    options: dict[str, dict[str, Any]] = {
        **{
            f"top-{k}-{mode}": {"monitor": "val_loss", "save_top_k": k, "mode": mode}
            for k, mode in itertools.product((1, 2, -1), ("min", "max"))
        },
        "last": {"save_last": True},
        "last-and-top": {"monitor": "val_loss", "save_last": True, "save_top_k": 2},
        "every-2-epochs": {"every_n_epochs": 2, "save_top_k": -1},
        "every-2-steps": {"every_n_train_steps": 2, "save_top_k": -1},
        "train-epoch-end": {"save_on_train_epoch_end": True, "monitor": "train_loss_epoch", "save_top_k": 2},
        "named": {"filename": "{epoch}-{val_loss:.3f}", "monitor": "val_loss", "save_top_k": -1},
        "weights-only": {"save_weights_only": True, "save_top_k": -1, "monitor": "val_loss"},
    }
    return {
        f"checkpoint-{name}": Scenario(
            lightning={"max_epochs": 4},
            forge=lambda: {"max_epochs": 4},
            callbacks=lambda folder, given=given: [ModelCheckpoint(folder, **given)],
        )
        for name, given in options.items()
    }


def others() -> dict[str, Scenario]:
    return {
        "hooks": Scenario(hearing(Subject)),
        "hooks-accumulated": Scenario(
            hearing(Subject), {"accumulate_grad_batches": 2}, lambda: {"plugins": [Accumulate(2)]}
        ),
        "hooks-two-loaders": Scenario(hearing(Several), val=lambda: [loader(8, seed=1), loader(6, seed=2)]),
        "loaders-three": Scenario(Several, val=lambda: [loader(4, seed=i) for i in (1, 2, 3)]),
        "loaders-one-name": Scenario(OneName, val=lambda: [loader(8, seed=1), loader(8, seed=2)]),
        "callbacks-hooks": Scenario(hearing(Subject), callbacks=lambda folder: [Recorder()]),
        "callbacks-of-the-module": Scenario(Configures, callbacks=lambda folder: [Recorder()]),
        "max-steps": Scenario(
            lightning={"max_epochs": -1, "max_steps": 7}, forge=lambda: {"max_epochs": None, "max_updates": 7}
        ),
        "returns-none": Scenario(Skips),
        "returns-dicts": Scenario(Dicts),
        "eval-layers-stay": Scenario(Frozen),
        "layers-of-setup": Scenario(Late),
        "own-optimizer-step": Scenario(Warms),
        "own-backward": Scenario(Doubles),
        "own-clipping": Scenario(Clips),
        "own-scheduler-step": Scenario(OwnSchedule),
        "no-optimizer": Scenario(hearing(Idle)),
        "inner-module": Scenario(Outer),
        "iterable-dataset": Scenario(train=lambda: DataLoader(Stream(), batch_size=4)),
        "batch-sampler": Scenario(
            train=lambda: DataLoader(TensorDataset(*numbers(18)), batch_sampler=[[0, 1, 2], [5, 4], [7, 8, 9, 10]])
        ),
        "plain-iterable": Scenario(train=lambda: Batches(loader())),
        "no-batch-dimension": Scenario(Odd, train=lambda: Batches(map(Box, range(5))), val=lambda: None),
        "datamodule": Scenario(hearing(Subject), datamodule=Data),
        "train-loaders-dict": Scenario(Pairs, datamodule=lambda: Data({"a": loader(8), "b": loader(18, seed=3)})),
        "train-loaders-list": Scenario(Pairs, datamodule=lambda: Data([loader(18), loader(8, seed=3)])),
    }


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return zip(*numbers(18), strict=True)


class Batches:
    """Neither a DataLoader nor a list, which Lightning takes for several loaders."""

    def __init__(self, batches: Any):
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


class Box:
    """A batch without a tensor that tells its size."""

    def __init__(self, value: int):
        self.value = float(value)


class Odd(Subject):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net[0].weight * batch.value).square().mean()


class Several(Subject):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch) + dataloader_idx)


class OneName(Subject):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log(f"val_loss_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)


class Recorder(L.Callback):
    """Notes its own calls among those of the module."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.heard.append(("callback batch", trainer.current_epoch, trainer.global_step, batch_idx))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.heard.append(("callback epoch", trainer.current_epoch, trainer.is_last_batch))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.heard.append(("callback val", sorted(n for n in trainer.callback_metrics if n == "val_loss")))


class Scales(L.Callback):
    """Changes the weights, as anomalib's callbacks and averages do."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            pl_module.net[0].weight.mul_(0.99)


class Configures(Subject):
    def configure_callbacks(self) -> Any:
        return [Scales(), Recorder()]


class Skips(Subject):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class Dicts(Subject):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "more": batch[0]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.heard.append((sorted(outputs), float(outputs["loss"]), tuple(outputs["more"].shape)))


class Frozen(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].eval()
        self.net[0].requires_grad_(False)


class Late(Subject):
    def setup(self, stage: str) -> None:
        self.more = nn.Linear(1, 1)

    def loss(self, batch: Any) -> Any:
        return (self.more(self.net(batch[0])) - batch[1]).square().mean()


class Warms(Subject):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * min(1.0, (self.trainer.global_step + 1) / 5)
        self.heard.append((epoch, batch_idx, optimizer.param_groups[0]["lr"]))
        optimizer.step(closure=optimizer_closure)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)  # under Lightning it runs inside the closure, and so sees the next rate


class Doubles(Subject):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.heard.append((epoch, batch_idx))
        optimizer.zero_grad(set_to_none=False)


class Clips(Subject):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class OwnSchedule(Subject):
    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=0.02)
        return [optimizer], lr.ExponentialLR(optimizer, 0.9)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.heard.append(("scheduler", metric))
        scheduler.step()


class Idle(Subject):
    def configure_optimizers(self) -> None:
        return None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train_loss", self.loss(batch), on_epoch=True)


class Inner(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Any) -> Any:
        return self.layer(x) + self.trainer.current_epoch


class Outer(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.names = Inner()  # a layer that is called as an attribute of the adapter

    def loss(self, batch: Any) -> Any:
        return (self.names(self.net(batch[0])) - batch[1]).square().mean()


class Data(L.LightningDataModule):
    def __init__(self, train: Any = None) -> None:
        super().__init__()
        self.train = loader() if train is None else train

    def train_dataloader(self) -> Any:
        return self.train

    def val_dataloader(self) -> Any:
        return loader(10, seed=1)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0], batch[1]] if isinstance(batch, list) and isinstance(batch[0], torch.Tensor) else batch


class Pairs(Subject):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        return sum(super(Pairs, self).training_step(part, batch_idx) for part in parts)


def all_scenarios() -> dict[str, Scenario]:
    """Every scenario by name, those of manual optimization too."""
    from tests.forge_lightning.manual_scenarios import manual

    groups = (schedules, plateaus, updates, validations, logging_, stops, checkpoints, others, manual)
    return {name: scenario for group in groups for name, scenario in group().items()}
