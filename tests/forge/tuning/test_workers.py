"""forge tune workers: the loader by its number of workers, and the step's need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import forge
from forge.cli import main, tune_workers
from forge.tuning import WorkersProbe, WorkersReport, step_timer, workers, workers_range
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


class Made(Dataset[Any]):
    """Samples that are counted."""

    count = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
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


def report(need: float, *speeds: float) -> WorkersReport:
    probes = [WorkersProbe(count, speed) for count, speed in zip((0, 1, 2, 4), speeds, strict=False)]
    return WorkersReport(probes, need, 10.0, 16)


def test_the_fewest_workers_that_feed_the_step_are_recommended() -> None:
    enough = report(100, 50, 90, 130, 200)
    assert (enough.recommended.workers, enough.limit) == (2, "compute")
    assert tune_workers.verdict(enough)[0].startswith("Compute is the limit")
    never = report(1000, 50, 90, 196, 200)
    assert (never.recommended.workers, never.limit) == (2, "data")
    assert "Data are the limit" in tune_workers.verdict(never)[0]
    assert "20 % of it" in tune_workers.verdict(never)[0]


@pytest.mark.slow
def test_the_need_is_the_speed_of_the_step_alone() -> None:
    data, measured = Made(), []
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
