"""No plugin waits for a CUDA device between logs: from the second update on every host sync is an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import forge
from forge.testing import TinyTask, fit_tiny, tiny_batches
from forge_plugins import AMP, DDP, EMA, FSDP, SAM, SWA, Accumulate, Clip, Freeze, Guard, Remat, Schedule

pytestmark = pytest.mark.gpu

THAW = {"net.0": "3 updates", "net.1": "5 updates"}
STACKS: dict[str, Any] = {
    "amp": lambda: [AMP("bf16"), Clip(0.1), Accumulate(3), Guard()],
    "ema": lambda: [EMA(), Guard(), Clip(0.1), Accumulate(2)],
    "ema with everything": lambda: [EMA(start=2, every=2, warmup=True, buffers="average")],
    "swa": lambda: [SWA(0, every="1 updates", lr=0.01, anneal=3), Accumulate(2)],
    "guard that rewinds": lambda: [Guard("rewind"), Clip(0.1), Accumulate(3), Schedule("cosine")],
    "sam": lambda: [SAM(0.5), Guard(), Clip(0.1), Accumulate(2)],
    "adaptive sam": lambda: [SAM(0.5, adaptive=True), Guard()],
    "freeze": lambda: [Freeze("net.[01]", thaw=THAW), Clip(0.1)],
    "remat": lambda: [Remat("net")],
    "ddp": lambda: [DDP(), AMP("bf16"), Clip(0.5)],
    "fsdp": lambda: [FSDP(), Accumulate(2), Clip(0.5), EMA(0.9), Guard("rewind")],
}
DEFAULT, ERROR = 0, 2
"""What torch.cuda.get_sync_debug_mode() says."""


class Fused(TinyTask):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


@pytest.fixture(autouse=True)
def syncs_are_allowed_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", STACKS)
def test_nothing_waits_for_the_device(name: str) -> None:
    first, modes = 1 if name == "ddp" else 0, []  # in the second update, DDP lays its buckets out anew, and waits

    @forge.on("step_end")
    def strict(step: forge.Step) -> None:
        modes.append(torch.cuda.get_sync_debug_mode())
        if step.index >= first:
            torch.cuda.set_sync_debug_mode("error")

    pinned = [(x.pin_memory(), y.pin_memory()) for x, y in tiny_batches([8] * 30)]
    options: dict[str, Any] = {"max_updates": 8, "device": "cuda", "log_every": 1000, "validate_every": None}
    fit_tiny([*STACKS[name](), strict], task=Fused(), train=pinned, **options)
    assert modes == [DEFAULT] * (first + 1) + [ERROR] * (7 - first)
