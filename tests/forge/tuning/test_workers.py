"""forge tune workers: the loader by its number of workers, and the step's need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import forge
from forge.cli import main, tune_workers
from forge.tuning import WorkersReport, step_timer, workers, workers_range

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

def fixed():
    return Splits(train=Loader(ROWS, 8))
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
    return WorkersReport(dict(zip((0, 1, 2, 4), speeds, strict=False)), need, 10.0, 16)


def test_the_fewest_workers_that_feed_the_step_are_recommended() -> None:
    enough = report(100, 50, 90, 130, 200)
    assert (enough.recommended, enough.limit) == (2, "compute")
    assert tune_workers.verdict(enough).startswith("Compute is the limit")
    never = report(1000, 50, 90, 196, 200)
    assert (never.recommended, never.limit) == (2, "data")
    assert "Data are the limit" in tune_workers.verdict(never)
    assert "20 % of it" in tune_workers.verdict(never)


@pytest.mark.slow
def test_the_need_is_the_speed_of_the_step_alone() -> None:
    data, begun = Made(), []

    class Counted(Line):
        def configure_optimizers(self) -> Any:
            begun.append(data.count)
            return super().configure_optimizers()

    found = workers_range(Counted, lambda count: DataLoader(data, 8), counts=[0], seconds=0.05, device="cpu")
    assert found.samples == 8
    assert found.need == pytest.approx(1000 * 8 / found.step_ms)
    assert [data.count] == begun  # no sample is made for it


@pytest.mark.parametrize("cores", [1, 2, 6, 16])
def test_numbers_of_workers_go_up_to_the_cores(cores: int) -> None:
    counts = workers.default_counts(cores)
    assert counts[:2] == [0, 1]
    assert counts[-1] == cores
    assert all(count <= cores for count in counts)


def test_it_ends_with_the_line_to_write_down(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "workers", f"{file}:Task", "trainer.device=cpu"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("recipe      data: {num_workers: ")
    assert "is the limit" in out or "are the limit" in out
    assert not Path("runs").exists()


def test_data_without_the_option_are_told_how_to_take_it(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "workers", f"{file}:Task", "--data", f"{file}:fixed"]) == 2
    assert "def data(num_workers: int = 0)" in capsys.readouterr().err
    assert main(["tune", "workers", f"{file}:Task", "--exact"]) == 2
    assert "--exact goes with `forge tune batch`" in capsys.readouterr().err
