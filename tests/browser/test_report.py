"""The page about many runs in Chromium, 1,300 pixels wide: nothing is cut off, and pictures keep their size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.metrics import drawing
from forge.report.page import page
from forge.runs.folder import RunFolder

pytest.importorskip("playwright")

from tests.browser.watched import chromium

pytestmark = pytest.mark.browser


def made(folder: Path, count: int) -> list[RunFolder]:
    """Run folders with a recipe and metrics."""
    from torch.utils.tensorboard import SummaryWriter

    for number in range(count):
        run = folder / f"run-{number:02d}"
        run.mkdir(parents=True)
        options = {"hidden": 32 * (number + 1), "dropout": number / 20, "lr": 10.0**-number}
        (run / "card.json").write_text(json.dumps({"task": {"class": "Task", "options": options}}))
        lines = [
            {"update": at, "train/loss": 1 / at, "val/loss": 2 / at, "val/accuracy": 1 - 1 / at}
            for at in (40, 50, 80, 100, 120)
        ]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with SummaryWriter(str(folder / "run-00" / "tensorboard")) as writer:
        writer.add_image("val/confusion", confusion(), 1)
    return [RunFolder(folder / f"run-{number:02d}") for number in range(count)]


def confusion() -> torch.Tensor:
    return drawing.confusion(torch.eye(14) * 9, [f"class {i}" for i in range(14)]).data


def test_fifteen_runs_fit_into_the_page(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page(made(tmp_path / "runs", 15)))
    with chromium() as browser:
        shown: Any = browser.new_page(viewport={"width": 1300, "height": 900})
        asked: list[str] = []
        shown.on("request", lambda request: asked.append(request.url))
        shown.context.set_offline(True)
        shown.goto((tmp_path / "page.html").as_uri())
        assert asked == [(tmp_path / "page.html").as_uri()]
        assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        cut = "[...document.querySelectorAll('.card')].filter(card => card.scrollWidth > card.clientWidth + 1).length"
        assert shown.evaluate(cut) == 0
        heads = shown.locator("table.many th").all_inner_texts()
        assert [head.replace("\u200b", "") for head in heads][2:5] == ["hidden", "dropout", "lr"]
        chart = shown.locator("svg[aria-label='loss, val']")
        assert chart.locator("path[data-name]").count() == 15
        box = chart.bounding_box()
        for index in range(15):
            curve = chart.locator("path[data-name]").nth(index).bounding_box()
            assert curve["y"] >= box["y"]
            assert curve["x"] + curve["width"] <= box["x"] + box["width"]
        assert "0" in chart.locator("text.tick").all_text_contents()


def test_a_narrow_screen_shows_words_and_ticks(tmp_path: Path) -> None:
    """360 pixels: names of runs are not broken into letters, and the texts of a chart are not shrunk with it."""
    runs = made(tmp_path / "20261118-132749", 2)
    with chromium() as browser:
        shown: Any = browser.new_page(viewport={"width": 360, "height": 900})
        for file, content in (("one", page(runs[:1])), ("two", page(runs))):
            (tmp_path / f"{file}.html").write_text(content)
            shown.goto((tmp_path / f"{file}.html").as_uri())
            assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            assert all(tick.bounding_box()["height"] > 9 for tick in shown.locator("svg>text.tick").all())
            if file == "one":  # its metrics are four columns
                assert shown.evaluate("(c => c.scrollWidth - c.clientWidth)(document.querySelector('.card'))") <= 1
        assert shown.locator("td", has_text="run-00").first.bounding_box()["width"] > 90


def test_a_key_hides_its_curve_and_pointing_tells_values(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page(made(tmp_path / "runs", 2)))
    with chromium() as browser:
        shown: Any = browser.new_page(viewport={"width": 1300, "height": 900})
        shown.goto((tmp_path / "page.html").as_uri())
        chart = shown.locator("figure.chart").first
        curve = chart.locator("path[data-name='A val']")
        assert curve.is_visible()
        chart.locator(".keys label", has_text="A val").click()
        assert not curve.is_visible()
        assert chart.locator("path[data-name='B val']").is_visible()
        column = chart.locator("g.at").nth(1)
        tip = column.locator("rect.tip")
        assert not tip.is_visible()
        column.locator("rect").first.hover()
        assert tip.is_visible()
        assert column.locator("text").first.text_content() == "update 50"
