"""Run folders of earlier versions load, resume and report as they did. record.py says how they were recorded."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge import cli
from tests.truth import kept_runs, record


@pytest.fixture(params=kept_runs.ALL)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "lightning":
        pytest.importorskip("lightning")
    return request.param


@pytest.fixture
def run(kind: str, empty_folder: Path) -> Path:
    """A copy of the folder that was kept."""
    shutil.copytree(kept_runs.FOLDER / kind / "run", empty_folder / kind / "run", symlinks=True)
    return empty_folder / kind / "run"


@pytest.fixture
def then(kind: str) -> dict[str, Any]:
    return json.loads((kept_runs.FOLDER / kind / "recorded.json").read_text(encoding="utf-8"))


def refuse_difference(now: Any, then: Any, tolerance: float, where: str = "") -> None:
    """Raise where something recorded is not there now, or is another value; what is new is no difference."""
    if isinstance(then, dict):
        assert isinstance(now, dict), where
        for key, value in then.items():
            assert key in now, f"{where}/{key} is missing"
            refuse_difference(now[key], value, tolerance, f"{where}/{key}")
    elif isinstance(then, list):
        assert isinstance(now, list), where
        assert len(now) == len(then), where
        for place, value in enumerate(then):
            refuse_difference(now[place], value, tolerance, f"{where}/{place}")
    elif isinstance(then, float):
        assert math.isclose(now, then, rel_tol=tolerance, abs_tol=tolerance / 10), f"{where}: {now}, was {then}"
    else:
        assert now == then, f"{where}: {now!r}, was {then!r}"


def refuse_another_end(kind: str, now: dict[str, Any], then: dict[str, Any]) -> None:
    refuse_difference(now, then, kept_runs.SINGLE if kind == "quickstart" else kept_runs.TOLERANCE)
    assert now["weights"].keys() == then["weights"].keys()


def test_a_run_that_was_cut_goes_on_and_ends_as_if_it_had_not(kind: str, run: Path, then: dict[str, Any]) -> None:
    refuse_another_end(kind, kept_runs.ending(kind, run, resume="auto"), then["ended"])


@pytest.mark.slow
def test_a_new_run_from_its_checkpoint_ends_there_too(
    kind: str, run: Path, then: dict[str, Any], tmp_path: Path
) -> None:
    (checkpoint,) = run.glob("checkpoints/update-*")
    now = kept_runs.ending(kind, tmp_path / "new", resume=checkpoint)
    kept = [line for line in then["ended"]["logged"] if line["update"] > kept_runs.CUT]
    now["logged"] = [line for line in now["logged"] if line["update"] > kept_runs.CUT]
    refuse_another_end(kind, now, {**then["ended"], "logged": kept})


@pytest.mark.slow
def test_a_run_from_its_start_ends_as_it_did(kind: str, then: dict[str, Any], tmp_path: Path) -> None:
    refuse_another_end(kind, kept_runs.ending(kind, tmp_path / "new"), then["ended"])


def test_weights_are_loaded_from_its_checkpoint(kind: str, run: Path, then: dict[str, Any]) -> None:
    task = kept_runs.make_task(kind)
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.fill_(7)
    forge.load_weights(task, run / "checkpoints" / "latest", weights="raw" if kind == "ema" else None)
    assert kept_runs.weights_of(task) == then["halfway"]


def test_commands_say_of_it_what_they_said(run: Path, then: dict[str, Any]) -> None:
    refuse_difference(record.said_of(run), then["said"], tolerance=0.0)


def test_every_byte_of_it_is_verified(run: Path) -> None:
    assert record.say("ckpt", "verify", str(run))
    (checkpoint,) = run.glob("checkpoints/update-*")
    damaged = next(checkpoint.glob("model*.safetensors"))
    *others, last = damaged.read_bytes()
    damaged.write_bytes(bytes([*others, last ^ 1]))
    assert cli.main(["ckpt", "verify", str(run)]) == 1


def test_its_page_is_written(run: Path, then: dict[str, Any]) -> None:
    record.say("report", str(run), "-o", "page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    (said,) = then["said"]["runs"]
    for word in (said["task"], *said["metrics"]):
        assert word in page, word
