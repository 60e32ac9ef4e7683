"""Streams of other packages, by the files of the page on data: resumed exactly by a new process, and faults named."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

import forge
from forge_plugins import Checkpoint
from tests.support import forked
from tests.support.docs_pages import blocks

NEEDS = {
    "archives": ("webdataset", "torchdata.stateful_dataloader"),
    "parquet": ("datasets", "pyarrow"),
    "chunks": ("litdata",),
    "mds": ("streaming",),
}
"""The files of the page, and the packages that they need."""
SAMPLES, CUT = 45, 10
"""Samples of the page's data, and an update in the second epoch."""


@pytest.fixture(params=NEEDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file of the page by its name, beside the data that it has written."""
    for package in NEEDS[request.param]:
        pytest.importorskip(package, reason=f"needs {package}, which the test extra leaves out if it is large")
    for block in blocks("docs/data.md", "py"):
        name = block.text.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(block.text)
    run(partial(_write, request.param), tmp_path)
    return request.param


def run(work: Callable[[], object], folder: Path, expected: int = 0) -> str:
    """Do something in a process of its own in this folder; return what it said."""
    done = forked.call(partial(_inside, str(folder), work))
    assert done.returncode == expected, done.stderr
    return done.stdout + done.stderr


def _inside(folder: str, work: Callable[[], object]) -> object:
    os.chdir(folder)
    sys.path.insert(0, folder)
    return work()


def _write(kind: str) -> None:
    import_module(kind).write()


KILLED = 9


def _life(kind: str, workers: int, folder: str, cut: int | None = None) -> None:
    """Train for three epochs in a folder, from where the run there is; end at once after the update `cut`."""
    torch.manual_seed(0)
    seen: list[Any] = []

    class Noting(import_module("sums").Sums):
        def training_step(self, batch: Any) -> Any:
            seen.append((self.trainer.progress.update, self.trainer.progress.epoch, batch[0][:, 0].tolist()))
            return super().training_step(batch)

    @forge.on("boundary", mutates=True)
    def power(trainer: forge.Trainer) -> None:
        if trainer.progress.update == cut:
            Path("seen-before.json").write_text(json.dumps(seen))
            os._exit(KILLED)

    power.observer = True
    task = Noting()
    plugins = [Checkpoint(every="2 updates", keep=2, background=False), power]
    options: dict[str, Any] = {"seed": 3, "device": "cpu", "resume": "auto", "max_epochs": 3, "run_dir": folder}
    forge.Trainer(plugins=plugins, **options).fit(task, import_module(kind).train(workers))
    torch.save(task.state_dict(), f"{folder}.pt")
    Path(f"seen-{folder}.json").write_text(json.dumps(seen))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_resumed_by_a_new_process_to_the_same_bits(kind: str, workers: int, tmp_path: Path) -> None:
    run(partial(_life, kind, workers, "straight"), tmp_path)
    run(partial(_life, kind, workers, "cut", CUT), tmp_path, KILLED)
    run(partial(_life, kind, workers, "cut"), tmp_path)
    straight, resumed = (torch.load(tmp_path / f"{name}.pt") for name in ("straight", "cut"))
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())
    before, after = (json.loads((tmp_path / f"seen-{name}.json").read_text()) for name in ("before", "cut"))
    assert 1 <= after[0][1] <= before[-1][1] == 1  # the second epoch
    course = [seen for seen in before if seen[0] < after[0][0]] + after
    assert course == json.loads((tmp_path / "seen-straight.json").read_text())
    for epoch in range(3):
        values = [value for _, each, batch in course if each == epoch for value in batch]
        assert len(values) == len(set(values)) == SAMPLES


# -- faults -----------------------------------------------------------------------------------------------------------


def _one(kind: str, workers: int = 0) -> None:
    forge.Trainer(max_epochs=1, device="cpu", run_dir=False, plugins=[]).fit(
        import_module("sums").Sums(), import_module(kind).train(workers)
    )


SHARDS = {"archives": "part-2.tar", "parquet": "part-2.parquet", "chunks": "chunk-0-2.bin", "mds": "shard.00002.mds"}
UNNAMED = {("mds", "missing")}
"""What its package does not name: the run ends with an error all the same."""


@pytest.mark.parametrize("fault", ["missing", "torn"])
def test_a_shard_that_cannot_be_read_is_named(kind: str, fault: str, tmp_path: Path) -> None:
    (shard,) = tmp_path.rglob(SHARDS[kind])
    data = shard.read_bytes()
    shard.unlink()
    if fault == "torn":
        shard.write_bytes(data[: len(data) // 5])  # where webdataset notices it: it does not everywhere
    said = run(partial(_one, kind), tmp_path, 1)
    assert SHARDS[kind] in said or (kind, fault) in UNNAMED


def _killed() -> None:
    import webdataset as wds

    loader = import_module("archives").train(2)
    loader.dataset.pipeline.append(wds.map(_die))
    forge.Trainer(max_epochs=1, device="cpu", run_dir=False, plugins=[]).fit(import_module("sums").Sums(), loader)


def _die(sample: Any) -> Any:
    worker = get_worker_info()
    if worker is not None and worker.id == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


@pytest.mark.parametrize("kind", ["archives"], indirect=True)
def test_a_worker_that_is_killed_is_told_with_its_signal(kind: str, tmp_path: Path) -> None:
    assert "is killed by signal: Killed" in run(_killed, tmp_path, 1)
