"""forge tune: what it prints, what it writes, and how it answers a mistake."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.cli import main, tune
from forge.config import read_recipe
from forge.tuning import BatchReport, Change, Lever, LeverRow, Probe, SpeedReport, StepReading, batch, step_timer
from forge.tuning.lr import rate_text
from forge.util import peak_memory
from forge_speed.commands import tune_speed

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


# -- the verdict ------------------------------------------------------------------------------------------------------


def verdict(*speeds: float, bound: Any = None, own: int = 1, rate: float | None = None) -> str:
    probes = [Probe(2**i, speed=speed) for i, speed in enumerate(speeds)]
    return " ".join(tune.verdict(BatchReport([*probes, *([bound] if bound else [])]), own, rate))


def test_a_smaller_batch_that_is_as_fast_is_pointed_out() -> None:
    said = verdict(100, 390, 400)
    assert "4 is the largest batch that works" in said
    assert "2 is within 3 % of the best speed (400 samples/s at 4), and makes more updates of the same data." in said


# -- speed ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times do not matter here."""
    for name, value in (("CHUNK", 0.0), ("SECONDS", 0.0), ("SHORT_EPOCH", 0.0), ("CHUNKS", 2)):
        monkeypatch.setattr(step_timer, name, value)


@pytest.mark.slow
def test_speed_writes_a_recipe_that_fit_takes(capsys: pytest.CaptureFixture[str], file: str, quick: None) -> None:
    words = [f"{file}:Task", "data.batch_size=8", "task.lr=0.01", "trainer.device=cpu", "--without", "compile"]
    out, err = ask(capsys, "speed", *words)
    names = (file, "runs/tune/Task-speed.yaml", "runs/tune/Task-speed.svg")
    assert written() == {str(Path(name).resolve()) for name in names}
    assert "Up to 10 minutes of trials on cpu; the precision stays" in err
    for text in ("fused_optimizer", "micro-batch 4", "needs CUDA", "left out", "changes the precision"):
        assert text in out
    config = yaml.safe_load(Path("runs/tune/Task-speed.yaml").read_text())
    assert config["task"] == {"lr": 0.01}
    assert config["trainer"] == {"device": "cpu"}
    assert config["data"]["batch_size"] in (4, 8)
    command = shlex.split(next(line for line in out.splitlines() if line.startswith("use it")).removeprefix("use it"))
    assert command[1:] == ["fit", f"{file}:Task", "--recipe", "runs/tune/Task-speed.yaml"]
    assert main([*command[1:], "-q", "trainer.max_epochs=1", "--run-dir", "runs/one"]) == 0
    assert Path("runs/one/weights.safetensors").is_file()


def report_of(**changed: Any) -> SpeedReport:
    start, fast = StepReading(10.0, 2 * 10**9, same=True), StepReading(4.0, 3 * 10**9, 31.0, same=False)
    rows = [
        LeverRow(Lever("compile", Change({"compile": {}}), "rounding"), "", fast, fast, chosen=True),
        LeverRow(Lever("amp bf16", Change({"amp": {}}), "precision"), "no gain", start, start),
        LeverRow(Lever("kernels", Change({"kernels": {}}), "rounding"), "RuntimeError: no", failed=True),
    ]
    return SpeedReport(start, rows, **{"best": fast, "chosen": [rows[0].lever], **changed})


def test_the_table_of_speed_has_times_memory_numbers_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    tune_speed.print_report(report_of())
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "start 10.0 ms 2.00 GB" in lines
    assert "compile 4.00 ms 3.00 GB 4.00 ms 3.00 GB rounding 31 s used" in lines
    assert "amp bf16 10.0 ms 2.00 GB 10.0 ms 2.00 GB precision no gain" in lines
    assert "failed kernels RuntimeError: no" in lines
    assert "2.50× as fast: 10.0 -> 4.00 ms per update, 2.00 -> 3.00 GB: compile." in lines


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"best": None, "chosen": []}, "your recipe stays as it is"),
        ({"best": None, "chosen": [], "dropped": "compile"}, "compile was no faster in the end"),
        ({"best": None, "chosen": [], "fits": False}, "Nothing fits into the limit"),
        ({"reproducible": False}, "gives other bits each time"),
        ({"extremes": (10.0, 12.0)}, "took 10.0 to 12.0 ms"),
        ({"spent": True}, "--budget"),
    ],
)
def test_the_verdict_of_speed_says_what_to_know(changed: Any, text: str) -> None:
    assert text in " ".join(tune_speed.verdict(report_of(**changed)))


def test_the_answer_changes_a_recipe_by_name(empty_folder: Path) -> None:
    recipe = read_recipe("frugal").checked()
    change = Change({"remat": None, "compile": {"dynamic": None}}, {"batch_size": 4})
    changed = tune_speed.changed_recipe(recipe, change)
    assert "remat" not in changed.plugins
    assert changed.plugins["compile"] == {"dynamic": None}
    assert changed.config["data"] == {"batch_size": 4}


def test_options_of_another_search_are_refused(capsys: pytest.CaptureFixture[str], file: str) -> None:
    _, err = ask(capsys, "lr", f"{file}:Task", "--bitwise", code=2)
    assert "forge tune has no option '--bitwise'" in err
    _, err = ask(capsys, "speed", f"{file}:Task", "--updates", "3", code=2)
    assert "forge tune speed has no option '--updates'" in err
    _, err = ask(capsys, "speed", f"{file}:Task", "--out", "x.png", code=2)
    assert ".yaml" in err
