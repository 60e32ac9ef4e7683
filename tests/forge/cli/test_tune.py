"""forge tune: what it prints, what it writes, and how it answers a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge.cli import main
from forge.tuning import batch
from forge.tuning.lr import rate_text
from forge.util import peak_memory

TASK = """
import torch
from torch import nn
import torch.nn.functional as F
import forge
from forge.data import Splits, TensorLoader

class Task(forge.TaskModule):
    def __init__(self, lr: float = 0.05):
        super().__init__()
        self.lr = lr
        self.net = nn.Linear(4, 2)

    def training_step(self, batch):
        x, y = batch
        if len(x) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2 * self.lr)

class Layers(Task):
    def configure_optimizers(self):
        groups = [{"params": [self.net.weight], "lr": self.lr / 10}, {"params": [self.net.bias]}]
        return torch.optim.SGD(groups, lr=self.lr)

class Fixed(Task):
    def __init__(self):
        super().__init__()

def data(batch_size: int = 16, samples: int = 128):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return Splits(train=TensorLoader(x, (x[:, 0] > 0).long(), batch_size=batch_size, shuffle=True))

def rigid(shift: float = 0.0):
    return data()
"""


@pytest.fixture
def file(empty_folder: Path) -> str:
    path = Path(f"task_{empty_folder.name}.py")  # modules are kept by their name
    path.write_text(TASK)
    return str(path)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(batch, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(peak_memory, "clean", lambda: None)


def ask(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert main(["tune", *words]) == code
    return capsys.readouterr()


def written() -> set[str]:
    return {str(path) for path in Path.cwd().rglob("*") if path.is_file() and "__pycache__" not in path.parts}


# -- lr ---------------------------------------------------------------------------------------------------------------


def test_a_range_test_prints_rates_and_the_command_for_them(capsys: Any) -> None:
    out, _ = ask(capsys, "lr", "quickstart", "task.hidden=32", "--updates", "60", "--min", "1e-5")
    lines = {words[1]: words[0] for words in map(str.split, out.splitlines()) if len(words) > 2}
    assert float(lines["now"]) == 3e-3
    assert 1e-4 < float(lines["suggestion"]) < 1e-1
    assert {"valley", "steepest"} <= lines.keys()
    assert out.splitlines()[-1].endswith(f"fit quickstart task.hidden=32 task.lr={lines['suggestion']}")
    assert written() == {str(Path.cwd() / "runs" / "tune" / "quickstart-lr.svg")}


@pytest.mark.slow
def test_of_layer_wise_rates_it_says_what_the_suggestion_is_of(capsys: Any, file: str) -> None:
    out, _ = ask(capsys, "lr", file + ":Layers", "--updates", "40", "--min", "1e-4")
    rates = {words[1]: words[0] for words in map(str.split, out.splitlines()) if len(words) > 2}
    first, factor = float(rates["suggestion"]), float(rates["suggestion"]) / 5e-3
    said = " ".join(out.split())
    assert "the first of 2 parameter groups; all were scaled by one factor" in said
    assert f"The suggestion multiplies each by {factor:.3g}: " in said
    assert f"5e-3 becomes {rate_text(first)}, 0.05 becomes {rate_text(10 * first)}." in said
    assert out.splitlines()[-1].endswith(f"task.lr={rate_text(10 * first)}")
    assert "parameter groups" not in ask(capsys, "lr", file + ":Task", "--updates", "40")[0]


def test_a_task_that_scales_its_rate_is_told_the_argument(capsys: Any, file: str) -> None:
    out, _ = ask(capsys, "lr", file + ":Task", "task.lr=0.02", "trainer.seed=1", "--updates", "50", "--min", "1e-4")
    rows = {words[1]: words[0] for words in map(str.split, out.splitlines()) if len(words) > 2}
    assert float(rows["now"]) == 0.04
    command = out.splitlines()[-1]
    assert command.endswith(f"fit {file}:Task trainer.seed=1 {command.split()[-1]}")
    assert float(command.rpartition("task.lr=")[2]) == pytest.approx(float(rows["suggestion"]) / 2, rel=0.06)


def test_a_task_without_the_argument_is_told_where_to_write_it(capsys: Any, file: str) -> None:
    out, _ = ask(capsys, "lr", file + ":Fixed", "--updates", "20")
    assert "The task takes no argument called lr: set it in configure_optimizers: multiply all rates by" in out


# -- batch ------------------------------------------------------------------------------------------------------------


def test_the_sizes_that_were_tried_are_a_table_with_a_command(capsys: Any, file: str) -> None:
    out, err = ask(capsys, "batch", file + ":Task")
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if row and row[0].isdigit()][:3] == ["16", "32", "64"]
    assert "32 is the largest batch that works; 64 does not: out of memory." in out
    assert "data.batch_size=" in out.splitlines()[-1]
    assert "A CPU does not report when memory is full: sizes up to --max 8192 are tried." in err
    assert "64: out of memory" in err
    assert not Path("runs").exists()


def test_the_largest_of_all_is_found_when_it_is_asked_for(capsys: Any, file: str) -> None:
    out, _ = ask(capsys, "batch", file + ":Task", "--exact")
    assert "40 is the largest batch that works; 41 does not: out of memory." in out


def test_data_of_one_size_only_are_refused_with_what_to_write(capsys: Any, file: str) -> None:
    _, err = ask(capsys, "batch", file + ":Task", "--data", file + ":rigid", code=2)
    assert "have no option batch_size (they have: shift)" in err
    assert "def data(batch_size: int = 32)" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lr", "--exact"], "--exact goes with `forge tune batch`."),
        (["lr", "--limit", "3"], "--limit goes with `forge tune batch`."),
        (["batch", "--min", "1"], "--min goes with `forge tune lr`."),
        (["batch", "--out", "a.png"], "--out goes with `forge tune lr`."),
        (["lr", "--updates", "3"], "too few for a range test"),
        (["lr", "--min", "1", "--max", "0.1"], "is empty"),
        (["lr", "--optimizer", "other"], "No optimizer 'other'."),
        (["batch", "--max", "0"], "it must be at least 1"),
    ],
)
def test_a_mistake_is_named(capsys: Any, file: str, words: list[str], said: str) -> None:
    _, err = ask(capsys, words[0], file + ":Task", *words[1:], code=2)
    assert said in err
