"""How long training waits for checkpoints on slow shared storage, and for staged states: two ranks, each a node.

python -m benchmarks.staged         # 60 updates, 192 MiB of state, storage of 20 MB/s for each rank
"""

from __future__ import annotations

import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import forge
from forge.checkpoint import publish
from forge_cluster.staged import Staged
from forge_plugins import DDP, Checkpoint
from tests.support.lasting_ranks import ranks

RATE, UPDATES = 20e6, 60
WAYS = (("nothing", 0), ("checkpoint", 50), ("checkpoint", 5), ("staged", 5))


class Layers(forge.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.layers(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def fit(place: Path, way: str, every: int) -> list[float]:
    """Train on this rank; return when each update ended."""
    os.environ["GROUP_RANK"] = os.environ["RANK"]
    written, ends = publish.write_file, []

    def slowly(path: Path, pieces: Any) -> Any:
        began, record = time.monotonic(), written(path, pieces)
        if place / "run" in path.parents:
            time.sleep(max(0.0, record.size / RATE - (time.monotonic() - began)))
        return record

    @forge.on("boundary")
    def note() -> None:
        ends.append(time.monotonic())

    saves = {
        "checkpoint": lambda: [Checkpoint(every=f"{every} updates", rehearse="off", keep=1)],
        "staged": lambda: [Staged(f"{every} updates", folder=f"{place}/{{node}}")],
    }
    publish.write_file = slowly
    try:
        inputs = torch.randn(8 * UPDATES, 1024, generator=torch.Generator().manual_seed(0))
        plugins = [DDP(), note, *saves.get(way, list)()]
        trainer = forge.Trainer(plugins=plugins, max_updates=UPDATES, run_dir=place / "run")
        trainer.fit(Layers(), DataLoader(TensorDataset(inputs), 8))
    finally:
        publish.write_file = written
    return ends


def main() -> None:
    print(f"{'':>20} {'60 updates':>12} {'longest':>9} {'waited':>8}   updates lost at most")
    for way, every in WAYS * 2:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            ends = ranks(2)(fit, Path(place), way, every)[0]
        gaps = sorted(b - a for a, b in pairwise(ends))
        usual = gaps[len(gaps) // 2]
        waited = sum(gap - usual for gap in gaps if gap > 1.5 * usual)
        # a state under way does not count yet
        lost = 2 * every or UPDATES
        print(f"{way:>14} {every or '':>5} {ends[-1] - ends[0]:>10.1f} s {gaps[-1]:>7.2f} s {waited:>6.1f} s   {lost}")


if __name__ == "__main__":
    main()
