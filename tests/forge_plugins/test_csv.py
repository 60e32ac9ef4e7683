"""csv: one table, read back by pandas' rules with Python's own reader."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from forge_plugins import CSV, JSONL, Checkpoint
from tests.forge_plugins.test_jsonl import lines_of
from tests.support.logger_runs import LAST, live, live_twice
from tests.support.profiles import some
from tests.support.tasks import Classifier, fit, make_batches


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file, strict=True))


def test_a_row_has_the_numbers_of_a_line_of_jsonl(tmp_path: Path) -> None:
    fit(train=make_batches(6), val=make_batches(1), plugins=[CSV(), JSONL()], run_dir=tmp_path, log_every=2)
    rows, lines = rows_of(tmp_path), lines_of(tmp_path)
    assert len(rows) == len(lines) == 4
    for row, line in zip(rows, lines, strict=True):
        numbers = {name: float(cell) for name, cell in row.items() if cell and name != "time"}
        assert numbers == {name: value for name, value in line.items() if name != "time"}


def test_position_comes_first_and_new_metrics_to_the_right(tmp_path: Path) -> None:
    fit(train=make_batches(2), val=make_batches(1), plugins=[CSV()], run_dir=tmp_path, log_every=1)
    columns = list(rows_of(tmp_path)[0])
    assert columns[:4] == ["update", "epoch", "sample", "time"]
    first_of_validation = min(columns.index(name) for name in columns if name.startswith("val/"))
    assert all(columns.index(name) < first_of_validation for name in columns if name.startswith("train/"))


@pytest.mark.slow
def test_a_killed_run_has_each_row_once(tmp_path: Path) -> None:
    live(CSV, tmp_path / "straight")
    live_twice(CSV, tmp_path / "cut")
    rows = {name: [{**row, "time": ""} for row in rows_of(tmp_path / name)] for name in ("straight", "cut")}
    assert rows["cut"] == rows["straight"]
    assert [int(row["update"]) for row in rows["cut"] if row["train/loss"]] == list(range(1, LAST + 1))


def test_numbers_that_are_not_finite_are_read_back(tmp_path: Path) -> None:
    class Broken(Classifier):
        def training_step(self, batch: Any) -> Any:
            return {**super().training_step(batch), "odd": math.inf, "none": math.nan}

    fit(Broken(), train=make_batches(1), plugins=[CSV()], run_dir=tmp_path)
    (row,) = rows_of(tmp_path)
    assert float(row["train/odd"]) == math.inf
    assert math.isnan(float(row["train/none"]))


@pytest.mark.parametrize("damage", some([b"\xff\xfe,1\n", b"no,number\n", b"3,1,2\n", bytes(64) + b"\n"], quick=1))
def test_damaged_rows_do_not_keep_a_run_from_resuming(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path, "log_every": 1, "plugins": [CSV(), Checkpoint()]}
    fit(max_updates=2, **options)
    good = (tmp_path / "metrics.csv").read_bytes()
    (tmp_path / "metrics.csv").write_bytes(good + damage + b"3,0,1")
    assert fit(max_updates=4, resume=True, **options).updates == 4
    known = [line.rstrip(b",") for line in (tmp_path / "metrics.csv").read_bytes().splitlines()[1:3]]
    assert known == good.splitlines()[1:]  # later columns are empty in earlier rows
    assert [row["update"] for row in rows_of(tmp_path)] == ["1", "2", "3", "4"]
    assert damage in (tmp_path / "metrics.csv.damaged").read_bytes()
    assert "1 damaged row of" in caplog.text
