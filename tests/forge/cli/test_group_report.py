"""The report of groups: means with bands, single runs folded below, a legend that toggles, values where one points."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge.report.page import page
from forge.runs.find import locate
from forge.runs.folder import RunFolder
from forge.runs.group import RunGroup
from tests.forge.cli.test_report import HOSTILE, Page
from tests.forge.cli.test_run_groups import write_group
from tests.forge.cli.test_runs import write_run


@pytest.fixture(autouse=True)
def folder(empty_folder: Path) -> Path:
    return empty_folder


class TestAGroup:
    def test_its_curve_is_the_mean_with_a_band(self) -> None:
        group = RunGroup(write_group("mine/g", {"seed-0": 1.0, "seed-1": 2.0}))
        text = page([group])
        assert Page(text).points("val") == [[(5, 3.0), (10, 1.5)]]
        assert text.count('class="band"') == 1
        assert "val 1.5 ± 0.7071" in Page(text).text
        for word in ("val/loss 1.50 ± 0.71", "seed-1", "Single runs", "2 runs of 0 epochs, 10 updates each"):
            assert word in Page(text).text

    def test_two_and_a_run_lie_side_by_side(self) -> None:
        write_group("mine/a", {"seed-0": 1.0, "seed-1": 2.0})
        write_group("mine/b", {"seed-0": 2.0, "seed-1": 2.0})
        write_run("mine/c", {"update": 5, "val/loss": 1.0}, {"update": 10, "val/loss": 0.5})
        text = page([locate(f"runs/mine/{name}") for name in "abc"])
        assert Page(text).points("A val", "C val") == [[(5, 3.0), (10, 1.5)], [(5, 1.0), (10, 0.5)]]
        assert text.count('class="band"') == 2
        assert "3 rows" in Page(text).text

    def test_a_stranger_writes_no_markup(self) -> None:
        home = write_group("mine/g", {"seed-0": 1.0, "seed-1": 2.0})
        content = {"command": HOSTILE, "job": HOSTILE, "runs": {HOSTILE: {}, "seed-0": HOSTILE}}
        (home / "group.json").write_text(json.dumps(content))
        (home / "notes.json").write_text(json.dumps({"tags": [HOSTILE], "note": HOSTILE}))
        shown = Page(page([RunGroup(home)]))
        assert not {"script", "img"} & set(shown.tags)
        assert "alert(" in shown.text

    def test_one_without_runs_has_a_page(self, tmp_path: Path) -> None:
        (tmp_path / "group.json").write_text("{}")
        assert "none begun" in Page(page([RunGroup(tmp_path)])).text


def lines(epoch_logs: int) -> list[dict[str, Any]]:
    """Two epochs of some logs each, and the mean of each epoch."""
    found: list[dict[str, Any]] = []
    for update in range(1, 2 * epoch_logs + 1):
        line: dict[str, Any] = {"update": update, "train/loss": 1.0 / update}
        if update % epoch_logs == 0:
            line["train/loss_epoch"] = sum(1.0 / at for at in range(update - epoch_logs + 1, update + 1)) / epoch_logs
        found.append(line)
    return found


class TestCharts:
    @pytest.mark.parametrize(("logs", "titles"), [(1, ["loss"]), (3, ["loss", "loss_epoch"])])
    def test_the_mean_of_an_epoch_that_is_one_log_is_no_second_chart(self, logs: int, titles: list[str]) -> None:
        text = page([RunFolder(write_run("a", *lines(logs)))])
        assert [title for title in ("loss", "loss_epoch") if f"<figcaption>{title}</figcaption>" in text] == titles

    def test_a_log_between_two_epochs_is_no_reason_for_a_second_chart(self) -> None:
        at = (20, 40, 50, 60, 80, 100)
        logs = [{"update": i, "train/loss": i, **({} if i == 50 else {"train/loss_epoch": -i})} for i in at]
        text = page([RunFolder(write_run("a", *logs))])
        assert "loss_epoch" not in text.partition("Curves")[2]
        assert Page(text).points("train") == [[(i, -i) for i in at if i != 50]]

    def test_a_key_hides_its_curve_and_what_is_told_of_it(self) -> None:
        text = page([RunFolder(write_run("a", *({"update": i, "train/loss": 1, "val/loss": 2} for i in (1, 2, 3))))])
        assert text.count("<input type='checkbox' checked>") == 2
        assert ".chart:has(.keys>:nth-child(2)>input:not(:checked)) .s1{display:none}" in text
        assert text.count('<g class="s1">') == 1 + 3
        assert Page(text).text.count("val 2") >= 3

    def test_a_curve_alone_needs_no_key(self) -> None:
        assert "<input" not in page([RunFolder(write_run("a", {"update": 1, "lr": 1.0}, {"update": 2, "lr": 2.0}))])

    def test_long_curves_tell_their_values_at_some_places(self) -> None:
        text = page([RunFolder(write_run("a", *({"update": i, "val/loss": i} for i in range(1, 500))))])
        assert text.count('class="at"') == 40

    def test_eight_runs_are_in_one_chart(self) -> None:
        runs = [
            RunFolder(write_run(f"mine/{k}", *({"update": i, "train/loss": k, "val/loss": i} for i in (1, 2))))
            for k in range(8)
        ]
        text = page(runs)
        assert text.count("<figcaption>loss</figcaption>") == 1
        assert {curve["stroke"] for curve in Page(text).curves} == {f"var(--c{i})" for i in range(8)}
