"""Seconds that a run loses when a process is killed: ddp restarted from a checkpoint, and torchft's replicas.

    python -m benchmarks.recovery                  # both, three rounds each; two minutes on two cores
    python -m benchmarks.recovery --rows torchft   # needs torchft-nightly

Two processes on one machine train an MLP, with a pause of 0.1 s in each update that stands for a larger model. One is
killed with -9 after 36 updates. "until the next update": seconds from the kill to the end of the first update that had
not been done before, by anyone who is left. "trained again": updates that had been done and were lost. ddp runs under
torchrun with a restart, and a checkpoint every 10 updates; a torchft replica is started again at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import forge
from benchmarks.command_line import some_of
from forge import registry
from forge.data import TensorLoader

KILLED, UPDATES, PAUSE = 36, 160, 0.1
ROWS = ("ddp", "torchft")


class Notes(forge.Plugin):
    """Writes when each update ended; one process kills itself."""

    def __init__(self, folder: Path, dies: bool):
        super().__init__()
        self.folder, self.dies = folder, dies

    @forge.hookimpl
    def forge_backward(self, step: forge.Step, loss: Tensor) -> None:
        time.sleep(PAUSE)
        if self.dies and step.index == KILLED:
            (self.folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        with (self.folder / f"updates-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps([step.index, time.time()]) + "\n")


class Mlp(forge.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(kind: str, folder: Path) -> None:
    """Train one process of a row."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = torch.randn(2048, 64), torch.randint(10, (2048,))
    second = os.environ["REPLICA_GROUP_ID" if kind == "torchft" else "RANK"] == "1"
    notes = Notes(folder, dies=second and not (folder / "killed").exists())
    mine: dict[str, Any] = {"ddp": {}, "checkpoint": {"every": "10 updates"}} if kind == "ddp" else {"torchft": {}}
    if kind == "torchft":
        mine["torchft"] = {"timeout": 5.0, "hostname": "127.0.0.1"}
    place: Any = folder / "run" if kind == "ddp" else False
    plugins = [registry.load("plugin", name)(**options) for name, options in mine.items()]
    forge.Trainer(
        max_epochs=None, max_updates=UPDATES, seed=1, resume="auto" if kind == "ddp" else None, run_dir=place,
        plugins=[notes, *plugins], device="cpu",
    ).fit(Mlp(), TensorLoader(*data, batch_size=64, shuffle=True))  # fmt: skip


def measure(kind: str) -> tuple[float, int]:
    """Run one row once; return the seconds lost and the updates trained again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (_restarted if kind == "ddp" else _replicas)(folder)
        killed = float((folder / "killed").read_text())
        ended = [json.loads(line) for path in folder.glob("updates-*") for line in path.read_text().splitlines()]
        done = max(update for update, at in ended if at <= killed)
        again = {update for update, at in ended if at > killed and update <= done}
        return min(at for update, at in ended if update > done) - killed, len(again)


def _restarted(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--standalone"]
    command += ["--no-python", sys.executable, "-m", "benchmarks.recovery", "--one", "ddp", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


def _replicas(folder: Path) -> None:
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

    house = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200, heartbeat_timeout_ms=1000)
    address = f"http://127.0.0.1:{house.address().rsplit(':', 1)[1]}"

    def start(number: int) -> subprocess.Popen[bytes]:
        own = {"TORCHFT_LIGHTHOUSE": address, "REPLICA_GROUP_ID": str(number)}
        command = [sys.executable, "-m", "benchmarks.recovery", "--one", "torchft", str(folder)]
        return subprocess.Popen(command, env=os.environ | own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    stays, dies = start(0), start(1)
    dies.wait(300)
    back = start(1)
    if stays.wait(300) or back.wait(300):
        raise RuntimeError("A replica failed.")
    house.shutdown()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rows", type=some_of(dict.fromkeys(ROWS)), default=list(ROWS), help="names with commas between"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("ROW", "FOLDER"), help="one process of a row")
    options = parser.parse_args(arguments)
    if options.one:
        train(options.one[0], Path(options.one[1]))
        return 0
    os.environ.setdefault("RUST_LOG", "warn")  # torchft's lighthouse prints several lines per update
    found: dict[str, list[tuple[float, int]]] = {row: [] for row in options.rows}
    for _ in range(options.rounds):
        for row in options.rows:
            found[row].append(measure(row))
            print(row, found[row][-1], file=sys.stderr, flush=True)
    table = Table("", "until the next update, s", "", "trained again")
    for row, rounds in found.items():
        seconds = [each for each, _ in rounds]
        spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
        table.add_row(row, f"{statistics.median(seconds):.1f}", spread, str(statistics.median(n for _, n in rounds)))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
