"""forge tune workers: the loader by its number of workers, the step's need, and what limits which."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import forge
from forge.cli import main, tune_workers
from forge.tuning import WorkersProbe, WorkersReport, step_timer, workers, workers_range
from forge.util.fork_garbage import collections_paused
from tests.support.profiles import some

TASK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import forge
from forge.data import Loader, Splits

ROWS = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))

class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def data(num_workers: int = 0):
    return Splits(train=DataLoader(ROWS, 8, shuffle=True, num_workers=num_workers))

def torchs():
    return Splits(train=DataLoader(ROWS, 8))

def forges():
    return Splits(train=Loader(ROWS, 8))

def listed():
    return Splits(train=[(torch.randn(8, 4), torch.randint(2, (8,)))] * 3)
"""


@pytest.fixture
def file(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = Path(f"task_{empty_folder.name}.py")
    path.write_text(TASK)
    monkeypatch.setattr(workers, "available_cores", lambda: 1)
    monkeypatch.setitem(workers.workers_range.__kwdefaults__, "seconds", 0.05)
    for name, value in (("CHUNK", 0.0), ("SECONDS", 0.0), ("SHORT_EPOCH", 0.0), ("CHUNKS", 2)):
        monkeypatch.setattr(step_timer, name, value)
    return str(path)


class Machine:
    """A clock and a scheduler in place of the real ones: they move when a sample is made, and by what it did."""

    def __init__(self, **seconds: float):
        self.seconds = seconds
        self.spent: dict[str, float] = dict.fromkeys(("asleep", "computing", "without a core"), 0.0)

    def make_sample(self) -> None:
        for deed, seconds in self.seconds.items():
            self.spent[deed.replace("_", " ")] += seconds

    def perf_counter(self) -> float:
        return sum(self.spent.values())

    def usage(self) -> tuple[float, float, int]:
        return self.spent["computing"], self.spent["without a core"], 0


class Made(Dataset[Any]):
    """Samples that a machine makes; they are counted."""

    def __init__(self, machine: Machine):
        self.machine, self.count = machine, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.machine.make_sample()
        self.count += 1
        return torch.randn(3), torch.randn(1)


class Line(forge.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch: Any) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("machine", "bound"),
    [
        (Machine(computing=0.002), "CPU of the transforms"),
        (Machine(computing=0.001, without_a_core=0.001), "CPU of the transforms"),
        (Machine(asleep=0.002), "waiting"),
        (Machine(asleep=0.0015, computing=0.0005), "waiting"),
    ],
)
def test_what_the_processes_did_is_the_verdict(machine: Machine, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "time", machine)
    monkeypatch.setattr(workers, "_usage", machine.usage)
    probe = workers._measure(DataLoader(Made(machine), 8), 0, 0, 0.3, [], 0)
    assert workers.bound_of(probe, cores=2) == bound
    assert probe.speed == pytest.approx(1 / 0.002)


def compute(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def compute_then_wait(seconds: float, done: Any, leave: Any) -> None:
    compute(seconds)
    done.set()
    leave.wait()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_system_says_what_this_process_and_its_children_computed(elsewhere: bool) -> None:
    before = workers._usage()
    if before is None:
        pytest.skip("this system has no /proc")
    if elsewhere:
        done, leave = multiprocessing.Event(), multiprocessing.Event()
        child = multiprocessing.Process(target=compute_then_wait, args=(0.1, done, leave))
        with collections_paused():
            child.start()
        done.wait()
        after = workers._usage()
        leave.set()
        child.join()
    else:
        compute(0.1)
        after = workers._usage()
    assert after is not None
    assert after[0] - before[0] > 0.08  # its counter moves at the ticks of the scheduler
    assert after[1] >= before[1]


def test_bytes_from_a_disk_are_the_disks_fault() -> None:
    assert workers.bound_of(WorkersProbe(2, 10.0, cpu=0.3, read=50e6), cores=4) == "disk"
    assert workers.bound_of(WorkersProbe(2, 10.0, cpu=1.9, read=50e6), cores=4) == "CPU of the transforms"
    assert workers.bound_of(WorkersProbe(2, 10.0, cpu=0.3, read=50e6, queued=1.6), cores=4) == "CPU of the transforms"


def report(need: float, *speeds: float) -> WorkersReport:
    probes = [WorkersProbe(count, speed, 0.1, 0.0) for count, speed in zip((0, 1, 2, 4), speeds, strict=False)]
    return WorkersReport(probes, need, 10.0, 16, cores=4)


def test_the_fewest_workers_that_feed_the_step_are_recommended() -> None:
    enough = report(100, 50, 90, 130, 200)
    assert (enough.recommended.workers, enough.limit, enough.bound) == (2, "compute", "not the limit")
    assert tune_workers.verdict(enough)[0].startswith("Compute is the limit")
    never = report(1000, 50, 90, 196, 200)
    assert (never.recommended.workers, never.limit, never.bound) == (2, "data", "waiting")
    assert "Data are the limit" in tune_workers.verdict(never)[0]
    assert "20 % of it" in tune_workers.verdict(never)[0]


@pytest.mark.slow
def test_the_need_is_the_speed_of_the_step_alone() -> None:
    data, measured = Made(Machine()), []
    found = workers_range(
        Line,
        lambda count: DataLoader(data, 8),
        counts=[0],
        seconds=0.05,
        tell=lambda probe: measured.append(data.count),
        device="cpu",
    )
    assert found.samples == 8
    assert found.need == pytest.approx(1000 * 8 / found.step_ms)
    assert [data.count] == measured  # no sample is made for it


@pytest.mark.parametrize("cores", [1, 2, 6, 16])
def test_numbers_of_workers_go_up_to_the_cores(cores: int) -> None:
    counts = workers.default_counts(cores)
    assert counts[:2] == [0, 1]
    assert counts[-1] == cores
    assert all(count <= cores for count in counts)


def test_a_loader_is_made_again_with_the_same_batches() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(torch.arange(5))

    rows = torch.arange(10)
    for loader in (DataLoader(rows, 3, drop_last=True), DataLoader(rows, None), DataLoader(Stream(), 2)):  # type: ignore[arg-type]
        again = workers.with_workers(loader, 0)
        assert [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]
    assert workers.with_workers([rows], 2) is None


@pytest.mark.parametrize(
    ("data", "last"),
    some(
        [
            ("data", "recipe      data: {num_workers: "),
            ("listed", "recipe      nothing to change"),
            ("torchs", "code        DataLoader(..., num_workers="),
        ],
        quick=1,
    ),
)
def test_it_ends_with_the_line_to_write_down(
    file: str, data: str, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "workers", f"{file}:Task", "--data", f"{file}:{data}", "trainer.device=cpu"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(last)
    assert "is the limit" in out or "are the limit" in out
    assert not Path("runs").exists()


def test_a_loader_of_forge_needs_the_option(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "workers", f"{file}:Task", "--data", f"{file}:forges"]) == 2
    assert "def data(num_workers: int = 0)" in capsys.readouterr().err
    assert main(["tune", "workers", f"{file}:Task", "--exact"]) == 2
    assert "--exact goes with `forge tune batch`" in capsys.readouterr().err
