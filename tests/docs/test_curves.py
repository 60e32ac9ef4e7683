"""docs/make_curves.py draws what runs wrote into metrics.jsonl."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import forge
from forge.testing import TinyTask, tiny_batches
from forge_plugins import JSONL
from tests.support.docs_pages import load_script


@pytest.fixture
def script() -> ModuleType:
    return load_script("make_curves")


def run(seed: int) -> Path:
    folder = Path(f"runs/seed-{seed}")
    trainer = forge.Trainer(max_epochs=3, seed=seed, log_every=2, plugins=[JSONL()], run_dir=folder)
    trainer.fit(TinyTask(), tiny_batches([4] * 4), tiny_batches([4] * 2))
    return folder


def test_every_run_and_stage_is_a_curve_of_its_log(script: ModuleType, empty_folder: Path) -> None:
    folders = [run(1), run(2)]
    assert script.main([*map(str, folders), "--name", "tiny", "--out", "pictures"]) == 0
    svg = Path("pictures/tiny.svg").read_text()
    assert svg.startswith("<svg")
    for word in ("training, seed 1", "training, seed 2", "validation, seed 1", "validation, seed 2"):
        assert word in svg
    lines = [json.loads(line) for line in (folders[0] / "metrics.jsonl").read_text().splitlines()]
    logged = [(line["update"], line["train/loss"]) for line in lines if "train/loss" in line]
    first = re.findall(r'data-points="([^"]*)"', svg)[0]
    drawn = [tuple(map(float, point.split(","))) for point in first.split()]
    assert [x for x, _ in drawn] == [x for x, _ in logged]
    assert [y for _, y in drawn] == pytest.approx([y for _, y in logged], rel=1e-4)
