"""The page of a sweep in Chromium: drawn, without a script, and nothing refused by its own policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_sweep.sweep_page import sweep_page
from tests.forge_sweep.test_sweep_page import line, summary

pytest.importorskip("playwright")
pytestmark = pytest.mark.browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_drawn(tmp_path: Path, scheme: Any) -> None:
    (tmp_path / "page.html").write_text(sweep_page(summary([line(n) for n in range(6)], best=5)))
    from tests.browser.watched import chromium

    said: list[str] = []
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1100, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((tmp_path / "page.html").as_uri())
        chart = page.locator("svg[aria-label='parallel coordinates']")
        box = chart.bounding_box()
        assert box is not None
        assert box["width"] > 900
        curves = chart.locator("path[data-trial]")
        assert curves.count() == 6
        for index in range(6):
            found = curves.nth(index).bounding_box()
            assert found is not None
            assert found["x"] >= box["x"]
            assert found["x"] + found["width"] <= box["x"] + box["width"]
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert said == []
