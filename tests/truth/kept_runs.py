"""Small runs of six kinds: the folders that they left are kept, and so is where each ended when nothing cut it.

    ending("plain", folder, cut=6)     trains 6 of 12 updates; ending("plain", folder, resume="auto") goes on

- quickstart: `forge fit quickstart` with a small network, cut by SIGTERM.
- plain: the recipe `default` with clip and schedule, on one process, cut by SIGTERM.
- sharded: fsdp on two ranks; each wrote its part of the checkpoints.
- ema: an average beside the weights, windows of two micro-batches, draws from every generator.
- gan: two networks with an optimizer each.
- lightning: a LightningModule in the LightningAdapter.

All but quickstart, which is float32, is float64 on the CPU, made of small whole numbers, and draws integers alone: a
normal number and dropout's mask come from other generators where torch was built with MKL. Processors then differ only
in the last bits of sums, roots and exponentials, so `TOLERANCE` is far above those, and far below the effect of a
single lost or repeated update.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import forge
from forge import cli
from forge.data import TensorLoader
from forge_plugins import CSV, EMA, FSDP, JSONL, Accumulate, Checkpoint, Clip, Guard, Schedule
from tests.support.lasting_ranks import ranks

FOLDER = Path(__file__).resolve().parent / "kept"
TOLERANCE = 1e-9
SINGLE = 1e-4
"""The tolerance of quickstart, in float32: rounding grows over its 10 updates."""
UPDATES = 12
CUT = 6
"""Where runs are cut: in the middle of an epoch, at an update that is logged anyway."""
QUICKSTART = (
    *("fit", "quickstart", "task.hidden=4", "task.dropout=0.0", "data.batch_size=256", "schedule.warmup=2"),
    *("checkpoint.keep=1", "trainer.max_epochs=2", "trainer.log_every=3", "trainer.device=cpu", "-p", "no:tensorboard"),
)


def numbers(*shape: int, modulus: int = 5) -> Tensor:
    """Small multiples of a quarter, around zero."""
    count = int(np.prod(shape))
    return ((torch.arange(count, dtype=torch.float64) * 3 % modulus) - modulus // 2).reshape(shape) / 4


def plain_weights(module: nn.Module) -> None:
    """Fill a module with numbers that no generator draws."""
    with torch.no_grad():
        for place, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, modulus=5 + 2 * (place % 2)))


def data(count: int = 32, batch_size: int = 4, shuffle: bool = True) -> TensorLoader:
    inputs = numbers(count, 4, modulus=11)
    return TensorLoader(inputs, (inputs.sum(1) * 4).long() % 3, batch_size=batch_size, shuffle=shuffle)


class Classifier(forge.TaskModule):
    """Four features, three classes."""

    def __init__(self, hidden: int = 6, lr: float = 0.05):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()
        plain_weights(self)

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).double().mean()}

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Noisy(Classifier):
    """Draws from every generator in its step, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        self.seen += len(x)
        noise = torch.randint(0, 4, x.shape) + random.randrange(4) + int(np.random.randint(4))
        return super().training_step((x + noise / 8, y))

    def configure_optimizers(self) -> Any:
        head = torch.optim.SGD(self.parameters(), lr=0.25, momentum=0.5)
        return head, torch.optim.lr_scheduler.StepLR(head, 4, gamma=0.5)


class GAN(forge.TaskModule):
    """Two networks, trained in turn on the same batch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        self.discriminator = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        plain_weights(self)

    def training_step(self, batch: Any, name: str) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        real = batch[0]
        fake = self.generator(torch.randint(-4, 5, (len(real), 2)).double() / 4)
        if name == "generator":
            return {"loss": F.softplus(-self.discriminator(fake)).mean()}
        right = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake.detach())).mean()
        return {"loss": right / 2}

    def configure_optimizers(self) -> Any:
        return {
            "generator": torch.optim.Adam(self.generator.parameters(), lr=0.02, betas=(0.5, 0.9)),
            "discriminator": torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9),
        }


def lightning_task() -> forge.TaskModule:
    import lightning.pytorch as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
            plain_weights(self)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            head = torch.optim.Adam(self.parameters(), lr=0.05)
            return {"optimizer": head, "lr_scheduler": torch.optim.lr_scheduler.StepLR(head, 1, gamma=0.5)}

    return forge.LightningAdapter(Module())


EVERY = {"every": "2 updates", "keep": 1}
KINDS: dict[str, tuple[Callable[[], forge.TaskModule], Callable[[], dict[str, Any]]]] = {
    "plain": (
        Classifier,
        lambda: {
            "recipe": forge.recipe("default", ["checkpoint.keep=1"], remove=["tensorboard"]),
            "plugins": [Clip(max_norm=0.5), Schedule("cosine", warmup=2)],
        },
    ),
    "sharded": (
        Classifier,
        lambda: {"plugins": [JSONL(), Guard(), Checkpoint(**EVERY), FSDP(blocks="Linear")]},
    ),
    "ema": (
        Noisy,
        lambda: {
            "plugins": [Accumulate(2), EMA(decay=0.5), Guard(), JSONL(), CSV(), Checkpoint(**EVERY)],
            "max_epochs": 3,
        },
    ),
    "gan": (GAN, lambda: {"plugins": [JSONL(), Checkpoint(**EVERY)]}),
    "lightning": (lightning_task, lambda: {"plugins": [JSONL(), Checkpoint(**EVERY)]}),
}
ALL = ("quickstart", *KINDS)


def fit(kind: str, run_dir: Path, cut: int | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Train 12 updates, or end the run after `cut`; return the weights and the number of updates."""

    @forge.on("step_end", mutates=True)
    def leave(step: Any) -> None:
        if step.index + 1 == cut and kind == "plain":
            signal.raise_signal(signal.SIGTERM)
        elif step.index + 1 == cut:
            step.trainer.request_stop("halfway", everywhere=True)

    make, options = KINDS[kind]
    given = {"max_epochs": 2, "max_updates": UPDATES, "log_every": 3, **options(), **settings}
    given["plugins"] = [*given["plugins"], leave]
    trainer = forge.Trainer(seed=5, run_dir=run_dir, device="cpu", **given)
    task = make()
    try:
        updates = trainer.fit(task, data(), None if kind == "gan" else data(8, shuffle=False)).updates
    except forge.Interrupted:
        updates = cut
    return {"weights": weights_of(task), "updates": updates}


def make_task(kind: str) -> forge.TaskModule:
    from forge_recipes.digits import DigitsMLP

    return DigitsMLP(hidden=4) if kind == "quickstart" else KINDS[kind][0]()


def quickstart(run_dir: Path, cut: int | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The same by the command line. Its weights are those of the newest checkpoint."""
    from forge_recipes.digits import DigitsMLP

    calls, step = [], DigitsMLP.training_step

    def leaving(task: Any, batch: Any) -> Any:
        calls.append(task.training)
        if sum(calls) == cut and task.training:
            signal.raise_signal(signal.SIGTERM)
        return step(task, batch)

    words = [*QUICKSTART, "--run-dir", str(run_dir)]
    if settings:
        words.append("--resume" if settings["resume"] == "auto" else f"trainer.resume={settings['resume']}")
    with mock.patch.object(DigitsMLP, "training_step", leaving if cut else step):
        code = cli.main(words)
    assert code == (85 if cut else 0)
    task = make_task("quickstart")
    latest = (run_dir / "checkpoints" / "latest").resolve()
    forge.load_weights(task, latest)
    return {"weights": weights_of(task), "updates": int(latest.name.removeprefix("update-"))}


def weights_of(task: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in task.state_dict().items()}


def logged_in(run_dir: Path) -> list[dict[str, Any]]:
    """What was logged, without the time."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def ending(kind: str, run_dir: Path, cut: int | None = None, **settings: Any) -> dict[str, Any]:
    """Run a kind, on ranks where it takes some: weights, exported weights, updates and what was logged."""
    if kind == "quickstart":
        found = quickstart(run_dir, cut, settings)
    elif kind == "sharded":
        found, *others = ranks(2)(fit, kind, run_dir, cut, settings)
        assert all(other == found for other in others)
    else:
        found = fit(kind, run_dir, cut, settings)
    exported = run_dir / "weights.safetensors"
    found["exported"] = weights_in(exported) if exported.exists() else None
    return {**found, "logged": logged_in(run_dir)}


def weights_in(file: Path) -> dict[str, Any]:
    return {name: value.tolist() for name, value in sorted(load_file(file).items())}
