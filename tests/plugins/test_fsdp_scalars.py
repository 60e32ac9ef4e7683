"""fsdp: parameters without a dimension, as a learned temperature, which torch does not shard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import forge
from forge.checkpoint import Checkpoints, StoredCheckpoint
from forge_plugins import (
    AMP,
    DDP,
    EMA,
    SAM,
    SWA,
    Accumulate,
    Checkpoint,
    Clip,
    Freeze,
    Guard,
    Pipeline,
    Remat,
    Schedule,
    TensorParallel,
    Zero,
)
from forge_plugins.fsdp import COUNTS_UNUSED, FSDP
from tests.support.fsdp_kit import Block, Deep, close, deep, peep, train, wide
from tests.support.lasting_ranks import ranks

EXACT = 1e-11


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

    options: dict[str, Any] = {}  # noqa: RUF012 (of the optimizer)

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


class Fused(Tempered):
    options = {"fused": True}  # noqa: RUF012


class ForEach(Tempered):
    options = {"foreach": True}  # noqa: RUF012


class Turns(Tempered):
    """Two optimizers, one of them for parameters without a dimension alone."""

    def configure_optimizers(self) -> Any:
        single = [parameter for parameter in self.parameters() if not parameter.ndim]
        others = [parameter for parameter in self.parameters() if parameter.ndim]
        return {"scales": torch.optim.SGD(single, lr=0.1), "others": torch.optim.AdamW(others, lr=0.01)}

    def training_step(self, batch: Any, optimizer: str | None = None) -> dict[str, Tensor]:
        return super().training_step(batch)


STACKS: dict[str, Any] = {
    "levers": lambda: (deep(Tempered), [Accumulate(3), Clip(0.05), EMA(0.9), Remat(), Schedule("linear")]),
    "fused": lambda: (deep(Fused), [FSDP(["Scaled", "temperature"]), Clip(0.05), Accumulate(2)]),
    "foreach": lambda: (deep(ForEach), [FSDP(reshard=False), Clip(0.05, norm_type=float("inf")), peep]),
    "on the host": lambda: (deep(Tempered), [FSDP(offload=True), Accumulate(2), Clip(0.05), EMA(0.9)]),
    "sam, guarded, swa": lambda: (deep(Tempered), [SAM(0.05), Guard("skip"), SWA(start=0.5)]),
    "values": lambda: (deep(Tempered), [Clip(max_norm=None, max_value=1e-3)]),
    "frozen": lambda: (deep(Tempered), [Freeze(["*.scale"], thaw="1 epoch"), Accumulate(2)]),
    "two optimizers": lambda: (deep(Turns), [Clip(0.05), Accumulate(2)]),
    "asking": lambda: (deep(Tempered), [FSDP(find_unused=COUNTS_UNUSED)]),
    "hybrid": lambda: (deep(Tempered), [FSDP(replicate=2), Accumulate(2), Clip(0.05), EMA(0.9)]),
}
QUICK = ("levers", "fused", "foreach", "on the host", "sam, guarded, swa", "two optimizers")


def run_stack(name: str) -> dict[str, Any]:
    task, plugins = STACKS[name]()
    kinds: set[type] = set()

    @forge.on("inspect_grads")
    def look(step: forge.Step) -> None:
        kinds.update(type(p) for p in step.parameters() if not p.ndim)

    return {**train(task, [*plugins, look]), "kinds": kinds}


@pytest.mark.parametrize(
    ("count", "name"),
    [
        *((2, name) for name in QUICK),
        *(pytest.param(2, name, marks=pytest.mark.slow) for name in STACKS if name not in (*QUICK, "hybrid")),
        *(pytest.param(4, name, marks=pytest.mark.slow) for name in STACKS),
    ],
)
def test_a_scalar_trains_as_in_one_process(count: int, name: str) -> None:
    alone, together = run_stack(name), ranks(count)(run_stack, name)
    for rank in together:
        assert rank["kinds"] == {nn.Parameter}
        close(rank, alone, EXACT)
        assert all(torch.equal(value, rank["weights"][key]) for key, value in together[0]["weights"].items())
