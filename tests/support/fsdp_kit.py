"""What the tests of fsdp share."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import forge
from forge.errors import NonFiniteError, PeerFailed
from forge.testing import tiny_batches
from forge_plugins import AMP, EMA, SAM, SWA, Accumulate, Clip, Compile, Freeze, Guard, Remat, Schedule
from forge_plugins.fsdp import COUNTS_UNUSED, FSDP
from tests.support.ranks import heard
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


class Gain(nn.Module):
    """A parameter without a dimension, and no other; it is drawn, so that a rank could draw another."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty((), dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.gain, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Scaled(Block):
    """A block with one in it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = Gain()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale(super().forward(x))


class Tempered(Deep):
    """Has such parameters before all others, in blocks, frozen, and without a use."""

    options: dict[str, Any] = {}

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(dtype=dtype)
        self.blocks = nn.ModuleList(Scaled(8).to(dtype) for _ in range(3))
        self.temperature, self.offset = Gain(dtype), Gain(dtype).requires_grad_(False)
        self.unused = Gain(dtype)
        self._modules = dict(reversed(self._modules.items()))  # so that the optimizer begins with them

    def forward(self, x: Tensor) -> Tensor:
        return self.temperature(super().forward(x)) + self.offset.gain

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1, **self.options)


class Shared(Tempered):
    """One for all blocks, and for what comes after them."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.scale = self.temperature


class Fused(Tempered):
    options = {"fused": True}


class ForEach(Tempered):
    options = {"foreach": True}


class Turns(Tempered):
    """Two optimizers, one of them for parameters without a dimension alone."""

    def configure_optimizers(self) -> Any:
        single = [parameter for parameter in self.parameters() if not parameter.ndim]
        others = [parameter for parameter in self.parameters() if parameter.ndim]
        return {"scales": torch.optim.SGD(single, lr=0.1), "others": torch.optim.AdamW(others, lr=0.01)}

    def training_step(self, batch: Any, optimizer: str | None = None) -> dict[str, Tensor]:
        return super().training_step(batch)


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
        "levers": lambda: (deep(Tempered), [Accumulate(3), Clip(0.05), EMA(0.9), Remat(), Schedule("linear")]),
        "two tasks": lambda: (PlainGAN().double(), [Accumulate(2), Clip(0.5)]),
        "two tasks, two blocks": lambda: (PlainGAN().double(), [FSDP(["generator", "discriminator"]), EMA(0.5)]),
        "two optimizers": lambda: (deep(Turns), [Clip(0.05), Accumulate(2)]),
        "kept until backward": lambda: (deep(), [FSDP(reshard=False), Accumulate(3), EMA(0.9)]),
        "evaluated with gradients": lambda: (deep(Graded), [FSDP(reshard=False), EMA(0.5)]),
        "fused": lambda: (deep(Fused), [FSDP(["Scaled", "temperature"]), Clip(0.05), Accumulate(2)]),
        "foreach": lambda: (deep(ForEach), [FSDP(reshard=False), Clip(0.05, norm_type=float("inf")), peep]),
        "on the host": lambda: (deep(Tempered), [FSDP(offload=True), Accumulate(2), Clip(0.05), EMA(0.9)]),
        "blocks on the host": lambda: (deep(), [FSDP(offload=True, blocks="Block"), Accumulate(2), EMA(0.9)]),
        "frozen blocks": lambda: (deep(), [Freeze(["blocks.0", "*.bias"], thaw="1 epoch"), Accumulate(2)]),
        "frozen scalars": lambda: (deep(Tempered), [Freeze(["*.scale"], thaw="1 epoch"), Accumulate(2)]),
        "tied": lambda: (Tied(), [Clip(0.5)]),
        "shared": lambda: (deep(Shared), [Accumulate(2), Clip(0.05), EMA(0.9)]),
        "sam": lambda: (deep(Tempered), [SAM(0.05), Accumulate(2), Clip(0.5)]),
        "values, guarded, swa and looked at": lambda: (
            deep(Tempered),
            [Clip(max_norm=None, max_value=1e-3), Guard("skip"), SWA(start=0.5), FSDP(reshard=False), peep],
        ),
        "compiled": lambda: (deep(), [Compile(backend="eager", blocks="Block"), Remat(every=2)]),
        "asking": lambda: (deep(Tempered), [FSDP(find_unused=COUNTS_UNUSED)]),
        "hybrid": lambda: (deep(Tempered), [FSDP(replicate=2), Accumulate(2), Clip(0.05), EMA(0.9)]),
    }


QUICK = ("levers",)
"""It has most parts of the others, which the long profile compares one by one, and all on four ranks."""
SLOW = [*((2, name) for name in stacks() if name not in (*QUICK, "hybrid")), *((4, name) for name in stacks())]


def full(tensor: Tensor) -> Tensor:
    """A tensor put together from all ranks, if it is divided."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def levers(options: dict[str, Any]) -> dict[str, Any]:
    plugins = [*([] if options else [AMP("bf16")]), Remat(), Accumulate(3), Clip(0.5), Schedule("linear"), EMA(0.5)]
    task, data = deep(Tempered, dtype=torch.float32), tiny_batches((8,) * 6)
    averaged: dict[str, Tensor] = {}

    @forge.on("step_end")
    def look(step: forge.Step) -> None:
        averaged.update({name: full(t).clone() for name, t in plugins[-1]._average.tensors.items()})

    found = train(task, [*plugins, look, FSDP(**options)], data, validate_every=None, max_epochs=1)
    return {"weights": found["weights"], "averaged": averaged}


def guarded(kind: type[Deep], policy: str) -> dict[str, Any]:
    torch.manual_seed(3)
    with heard() as told:
        try:
            found = train(kind(), [Guard(policy)], wide(sizes=(8,) * 4), validate_every=None, max_epochs=1)
        except (NonFiniteError, PeerFailed) as error:  # the second on the rank that hears of it
            return {"error": str(error)}
    return {**found, "told": [text for text in told if text.startswith("guard skips")]}
