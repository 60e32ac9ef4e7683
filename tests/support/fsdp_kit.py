"""What the tests of fsdp share."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.errors import NonFiniteError, PeerFailed
from forge.testing import tiny_batches
from forge_plugins import AMP, EMA, SAM, SWA, Accumulate, Clip, Compile, Freeze, Guard, Remat, Schedule
from forge_plugins.fsdp import FSDP
from tests.support.tasks import PlainGAN

SIZES = (8, 8, 5, 1)
"""Five samples on four ranks are uneven; one sample leaves all but one rank without any."""

EXACT = 1e-12
"""The tolerance in float64: sums over samples are taken in another order, and nothing else."""


class Block(nn.Module):
    """A residual block: its hidden size is divided by no number of ranks here."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 7), nn.Linear(7, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Deep(forge.TaskModule):
    """Three equal blocks between two layers of other kinds; in float64, without what depends on the rank."""

    def __init__(self, lr: float = 0.1, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.lr = lr
        self.stem = nn.Linear(6, 8, dtype=dtype)
        self.blocks = nn.ModuleList(Block(8).to(dtype) for _ in range(3))
        self.head = nn.Linear(8, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def predict_step(self, batch: Any) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr / 10)


class Tied(Deep):
    """Two blocks that share a layer, and a head that shares a weight with the stem."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].fc1 = self.blocks[0].fc1  # pyright: ignore[reportAttributeAccessIssue]
        self.out = nn.Linear(6, 8, dtype=torch.float64)
        self.out.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.out(x)[:, :3]


def deep(kind: type[Deep] = Deep, **options: Any) -> Deep:
    torch.manual_seed(3)
    return kind(**options)


def wide(seed: int = 0, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    return [(x.double(), y) for x, y in tiny_batches(sizes, seed)]


def train(task: forge.TaskModule, plugins: list[Any], data: Any = None, **options: Any) -> dict[str, Any]:
    """Fit; on several ranks with fsdp, unless the plugins have one. Weights, metrics and counters."""
    given = [plugin for plugin in plugins if isinstance(plugin, FSDP)]
    several = (given or [FSDP()]) if "RANK" in os.environ else []
    plugins = [plugin for plugin in plugins if plugin not in given]
    options = {"max_epochs": 2, "seed": 0, "device": "cpu", "run_dir": False, "log_every": 2, **options}
    trainer = forge.Trainer(plugins=[*plugins, *several], **options)
    result = trainer.fit(task, wide() if data is None else data, wide(1, SIZES[-2:]))
    weights = {name: value.detach().clone() for name, value in task.state_dict().items()}
    return {"weights": weights, "metrics": result.metrics, "updates": result.updates, "stop": result.stop_reason}


def close(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = EXACT) -> None:
    assert ours["updates"] == theirs["updates"]
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, value in theirs["weights"].items():
        assert type(ours["weights"][name]) is Tensor
        torch.testing.assert_close(ours["weights"][name], value, rtol=tolerance, atol=tolerance)
    trained, other = ({n: v for n, v in run["metrics"].items() if "compile" not in n} for run in (ours, theirs))
    assert trained == pytest.approx(other, rel=max(1e-6, tolerance))


class Graded(Deep):
    """Keeps what was gathered for an evaluation, because a backward might come."""

    evaluation = "grad"


@forge.on("inspect_grads")
def peep(step: forge.Step) -> None:
    """Gathers weights that are old by the next forward."""
    with torch.no_grad():
        step.trainer.model(wide()[0], "val")


def stacks() -> dict[str, Any]:
    """What is compared: by name, how to make a task and its plugins."""
    return {
        "nothing": lambda: (deep(), []),
        "window 3": lambda: (deep(), [Accumulate(3)]),
        "levers": lambda: (deep(), [Accumulate(3), Clip(0.5), EMA(0.9), Remat(), Schedule("linear")]),
        "values": lambda: (deep(), [Clip(max_norm=None, max_value=0.01)]),
        "two optimizers": lambda: (PlainGAN().double(), [Accumulate(2), Clip(0.5)]),
        "two optimizers, two blocks": lambda: (PlainGAN().double(), [FSDP(["generator", "discriminator"]), EMA(0.5)]),
        "kept until backward": lambda: (deep(), [FSDP(reshard=False), Accumulate(3), EMA(0.9)]),
        "evaluated with gradients": lambda: (deep(Graded), [FSDP(reshard=False), EMA(0.5)]),
        "looked at before the step": lambda: (deep(), [FSDP(reshard=False), peep]),
        "on the host": lambda: (deep(), [FSDP(offload=True, blocks="Block"), Accumulate(2), Clip(0.5), EMA(0.9)]),
        "frozen blocks": lambda: (deep(), [Freeze(["blocks.0", "*.bias"], thaw="1 epoch"), Accumulate(2)]),
        "swa": lambda: (deep(), [SWA(start=0.5)]),
        "tied": lambda: (Tied(), [Clip(0.5)]),
        "sam": lambda: (deep(), [SAM(0.05), Accumulate(2), Clip(0.5)]),
        "guarded": lambda: (deep(), [Guard("skip")]),
        "values, guarded, swa and looked at": lambda: (
            deep(),
            [Clip(max_norm=None, max_value=0.01), Guard("skip"), SWA(start=0.5), FSDP(reshard=False), peep],
        ),
        "compiled": lambda: (deep(), [Compile(backend="eager", blocks="Block"), Remat(every=2)]),
    }


QUICK = ("levers",)
"""It has most parts of the others, which the long profile compares one by one, and all on four ranks."""
SLOW = [*((2, name) for name in stacks() if name not in QUICK), *((4, name) for name in stacks())]


def levers(options: dict[str, Any]) -> dict[str, Any]:
    plugins = [*([] if options else [AMP("bf16")]), Remat(), Accumulate(3), Clip(0.5), Schedule("linear"), EMA(0.5)]
    task, data = deep(dtype=torch.float32), tiny_batches((8,) * 6)
    averaged: dict[str, Tensor] = {}

    @forge.on("step_end")
    def look(step: forge.Step) -> None:
        averaged.update({name: t.full_tensor() for name, t in plugins[-1]._average.tensors.items()})

    found = train(task, [*plugins, look, FSDP(**options)], data, validate_every=None, max_epochs=1)
    return {"weights": found["weights"], "averaged": averaged}


def guarded(kind: type[Deep], policy: str) -> dict[str, Any]:
    torch.manual_seed(3)
    task, told = kind(), []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("forge").addHandler(handler)
    try:
        found = train(task, [Guard(policy)], wide(sizes=(8,) * 4), validate_every=None, max_epochs=1)
        return {**found, "told": [text for text in told if text.startswith("guard skips")]}
    except (NonFiniteError, PeerFailed) as error:  # the second on the rank that hears of it
        return {"error": str(error)}
    finally:
        logging.getLogger("forge").removeHandler(handler)
