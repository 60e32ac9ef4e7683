"""Searches for the largest batch on a GPU, in a process that holds no other memory; prints what they find as JSON."""

from __future__ import annotations

import gc
import json
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

import forge
from forge.tuning import batch_range

MEGABYTES = 16


class Heavy(forge.TaskModule):
    """Takes a known amount of memory for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(MEGABYTES * 1024 * 1024 // 4))

    def training_step(self, batch: torch.Tensor) -> Any:
        return (batch * self.weight).sin().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(size: int) -> list[torch.Tensor]:
    return [torch.ones(size, 1) for _ in range(4)]


def main() -> None:
    budget = batch_range(Heavy, samples, start=4, highest=64, limit=1.0, device="cuda", updates=3)
    gc.collect()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 2 * 1024**3
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    before = torch.cuda.memory_allocated()
    real = batch_range(Heavy, samples, start=8, highest=512, exact=True, device="cuda", updates=3)
    gc.collect()
    left = torch.cuda.memory_allocated() - before
    print(json.dumps({"budget": asdict(budget), "real": asdict(real), "limit": limit, "left": left}))


if __name__ == "__main__":
    main()
