"""One replica of tests/forge_cluster/test_torchft.py: train, and say which updates were begun, with how many others."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.data import TensorLoader
from forge_cluster.torchft import Torchft
from forge_plugins import Clip


class Wide(forge.TaskModule):
    """A classifier in float64, with a parameter that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Fate(forge.Plugin):
    """Pauses in every update and notes it; dies, fails, or misses that others succeed, after so many with others."""

    def __init__(self, note: Path, pause: float, die: int, fail: int, miss: int, strategy: Torchft | None):
        super().__init__()
        self.note, self.pause, self.strategy = note, pause, strategy
        self.die, self.fail, self.miss, self.together = die, fail, miss, 0
        if strategy is not None:
            add_up, strategy._add_up = strategy._add_up, self.add_up_and_miss
            self.add_up = add_up

    def add_up_and_miss(self, step: forge.Step) -> None:
        self.add_up(step)
        if self.together == self.miss:
            self.miss = -1
            self.report("the answer was lost")

    def report(self, what: str) -> None:
        assert self.strategy is not None
        assert self.strategy._manager is not None
        self.strategy._manager.report_error(RuntimeError(what))

    @forge.hookimpl
    def forge_backward(self, step: forge.Step, loss: Tensor) -> None:
        manager = self.strategy and self.strategy._manager
        others = manager.num_participants() if manager else 1
        with self.note.open("a") as file:
            file.write(json.dumps({"update": step.index, "of": others}) + "\n")
        time.sleep(self.pause)  # limit: it makes room for a replica that comes back; no time is compared
        self.together += others > 1
        if self.together == self.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.together == self.fail:
            self.fail = -1
            self.report("a cable was pulled")


def main(folder: str, updates: str, pause: str = "0", die: str = "-1", fail: str = "-1", miss: str = "-1") -> None:
    torch.manual_seed(0)
    data = torch.randn(60, 6, dtype=torch.float64), torch.randint(3, (60,))
    lost = 30.0  # limit: a replica that is silent for so long is lost, on purpose; a step takes milliseconds
    strategy = Torchft(timeout=lost, hostname="127.0.0.1") if "TORCHFT_LIGHTHOUSE" in os.environ else None
    note = Path(folder) / "updates.jsonl"
    plugins: list[forge.Plugin] = [
        Fate(note, float(pause), int(die), int(fail), int(miss), strategy),
        Clip(max_norm=0.5),
    ]
    plugins += [strategy] if strategy else []
    options: dict[str, Any] = {"max_epochs": None, "max_updates": int(updates), "seed": 3, "run_dir": False}
    task = Wide()
    # 60 samples in batches of 7: the epoch's last batch has 4, which are shared out unevenly
    result = forge.Trainer(plugins=plugins, device="cpu", **options).fit(
        task, TensorLoader(*data, batch_size=7, shuffle=True)
    )
    assert result.updates == int(updates)
    torch.save(task.state_dict(), Path(folder) / "weights.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
