"""The gallery: examples run, Lightning's versions do the same, and the page counts the lines that there are."""

from __future__ import annotations

import re
import runpy
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import forge
from benchmarks.examples import EXAMPLES, IN_LIGHTNING, Example, lines_of_code
from tests.conftest import REPO
from tests.support.docs_pages import blocks, read
from tests.support.lightning_twin import run_like_forge
from tests.support.profiles import some

BY_TITLE = {example.title: example for example in EXAMPLES}
LIKE_LIGHTNING = {"Staged fine-tuning": ('"thaw": "2 epochs"', '"thaw": "2 epochs", "norm": False')}
"""What a page does otherwise: forge's frozen BatchNorm keeps its statistics, those of BackboneFinetuning change."""


@pytest.fixture
def shapes(empty_folder: Path) -> Path:
    """The folders of pictures that the page draws."""
    for page in ("images-in-folders", "examples/mixup"):
        exec(blocks(f"docs/{page}.md", "python")[0].text, {"__name__": "make_shapes"})
    return empty_folder / "shapes"


@pytest.mark.parametrize("title", BY_TITLE)
def test_the_gallery_has_the_lines_that_there_are(title: str) -> None:
    example = BY_TITLE[title]
    row = rf"^\| \[{title}\]\(([^)]+)\) .*\| (\d+) \| \[(\d+)\]\(([^)]+)\) \|$"
    ((page, ours, theirs, twin),) = re.findall(row, read("docs/examples.md"), flags=re.MULTILINE)
    assert REPO / example.page == (REPO / "docs" / page.partition("#")[0]).resolve()
    assert (IN_LIGHTNING / example.twin) == (REPO / "docs" / twin).resolve()
    assert (int(ours), int(theirs)) == (lines_of_code(example.code), lines_of_code(example.twin_code))


@pytest.mark.parametrize("title", some(BY_TITLE))
def test_both_versions_are_formatted_alike(title: str) -> None:
    example = BY_TITLE[title]
    for name, text in (("the page", example.code), (example.twin, example.twin_code)):
        command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length=120", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
        assert lines_of_code(done.stdout) == lines_of_code(text), name


@pytest.mark.slow
@pytest.mark.parametrize("title", ["Sequence to sequence", "Staged fine-tuning"])
def test_a_long_example_takes_its_first_steps(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full profile runs the page to its end."""
    trainer = forge.Trainer
    monkeypatch.setattr(forge, "Trainer", lambda run_dir, **settings: trainer(smoke=True, **settings))
    found = variables(BY_TITLE[title])
    assert found["result"].metrics["train/loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "title",
    [
        *("Image classifier", "Two losses", "Staged fine-tuning", "Sequence to sequence", "VAE", "Hugging Face"),
        *("Notebook", "Two-tower retrieval", "Mixup and CutMix"),
    ],
)
def test_lightnings_version_trains_the_same_weights(title: str, shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same order of the data and the same random numbers every weight is equal, bit for bit."""
    if title == "Notebook":
        pytest.importorskip("pandas")  # Lightning's version draws its table with it
    example, tasks = BY_TITLE[title], []
    fit = forge.Trainer.fit
    monkeypatch.setattr(
        forge.Trainer, "fit", lambda self, task, *rest, **named: tasks.append(task) or fit(self, task, *rest, **named)
    )
    torch.manual_seed(0)  # for the pages that give no seed
    code = example.code.replace(*LIKE_LIGHTNING.get(title, ("", "")))
    result = variables(example, code)["result"]
    torch.manual_seed(0)
    seed = 0 if "seed=0" in code else None
    trainer = run_like_forge(IN_LIGHTNING / example.twin, monkeypatch, seed)["trainer"]
    assert trainer.global_step == result.updates
    ours, theirs = tasks[0].state_dict(), trainer.lightning_module.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    validated = {name for name in result.metrics if name.startswith("val/")}
    assert validated == {name for name in trainer.callback_metrics if name.startswith("val/")}
    for name in validated:  # Lightning adds up in four bytes
        assert float(trainer.callback_metrics[name]) == pytest.approx(result.metrics[name], rel=1e-6), name


@pytest.mark.slow
def test_both_versions_log_to_the_same_tables(empty_folder: Path) -> None:
    L = pytest.importorskip("lightning")
    example = BY_TITLE["Another logger"]
    found: dict[str, Any] = {"__name__": "example"}
    for block in blocks(example.page, "python"):
        exec(block.text, found)
    logger = in_lightning(example)["Sqlite"]("runs/theirs")
    digits_module = runpy.run_path(str(IN_LIGHTNING / "digits_module.py"))
    trainer = L.Trainer(max_steps=6, log_every_n_steps=2, logger=logger, enable_progress_bar=False)
    trainer.fit(digits_module["Digits"](), *digits_module["loaders"]())
    counted = "select count(*) from points where name = 'train/loss'"
    rates = ["select value from options where name = 'task.lr'", "select value from options where name = 'lr'"]
    for run, rate in zip(("logged", "theirs"), rates, strict=True):
        with sqlite3.connect(f"runs/{run}/metrics.db") as db:
            assert db.execute(counted).fetchone() == (3,)
            assert db.execute(rate).fetchone() == (0.003,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "metric", "least"),
    [("Distillation", "val/accuracy", 0.9), ("DPO", "val/right", 0.9), ("PPO", "train/return", 40)],
)
def test_lightnings_version_learns(
    title: str, metric: str, least: float, empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that tests hold beside a plain loop, on forge's side."""
    pytest.importorskip("lightning")
    pytest.importorskip("gymnasium")
    monkeypatch.syspath_prepend(str(IN_LIGHTNING))
    trainer = in_lightning(BY_TITLE[title])["trainer"]
    assert float(trainer.callback_metrics[metric]) > least


@pytest.mark.slow
def test_a_resumed_run_of_lightnings_ends_elsewhere(empty_folder: Path) -> None:
    """What the gallery says of warm restarts: the rate is the same, the rest of the epoch is not."""
    L = pytest.importorskip("lightning")
    run = in_lightning(BY_TITLE["Warm restarts"])["run"]

    class PowerCut(L.Callback):
        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            if trainer.global_step == 38:
                raise RuntimeError("the lights went out")

    (straight, _), (again, _) = run("runs/straight"), run("runs/again")
    with pytest.raises(RuntimeError, match="lights"):
        run("runs/cut", PowerCut())
    resumed, trainer = run("runs/cut")
    assert trainer.global_step == 75
    weights = [list(module.state_dict().values()) for module in (straight, again, resumed)]
    assert all(map(torch.equal, weights[0], weights[1]))
    assert not all(map(torch.equal, weights[0], weights[2]))


def test_the_graphs_of_pyg_are_learned(empty_folder: Path) -> None:
    pytest.importorskip("torch_geometric")
    plain, pyg = blocks("docs/graphs.md", "python")[0], blocks("docs/graphs.md", "text")[0]
    found: dict[str, Any] = {"__name__": "example"}
    exec(plain.text, found)
    exec(pyg.text, found)
    assert found["result"].metrics["val/accuracy"] > 0.9
    assert found["result"].metrics["val/loss"] < 0.2


def pictures(folder: Path, name: str) -> list[Any]:
    """What TensorBoard reads of a picture in a folder of events."""
    events = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    return events.Images(name)


def variables(example: Example, code: str = "") -> dict[str, Any]:
    """What the names of a page are after its code ran."""
    found: dict[str, Any] = {"__name__": "example"}
    exec(compile(code or example.code, example.page, "exec"), found)
    return found


def in_lightning(example: Example) -> dict[str, Any]:
    return runpy.run_path(str(IN_LIGHTNING / example.twin), run_name="__main__")
