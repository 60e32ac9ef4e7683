"""The site opened from the disk in Chromium: the search finds what people look for, without a server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge.version import __version__
from tests.conftest import REPO

pytest.importorskip("playwright")
pytest.importorskip("material")
pytestmark = pytest.mark.browser

WANTED = {
    "images in folders": ("Images in folders", 3),
    "wandb": ("wandb: Weights & Biases logging", 3),
    "resume": ("Checkpointing and resuming", 3),
    "multi-node": ("Multi-node training", 3),
    "sweep": ("Hyperparameter sweeps", 3),
    "learning rate": ("Frequently asked questions", 3),
    "reinforcement learning": ("Reinforcement learning: PPO on cart pole", 1),
    "distillation": ("Distillation: a student learns from a frozen teacher", 1),
    "DPO": ("DPO: preferences against a frozen reference", 1),
    "LoRA": ("Several models", 1),
    "retrieval": ("Two-tower retrieval: a contrastive loss with in-batch negatives", 1),
    "warm restarts": ("Warm restarts: cosine annealing in cycles", 1),
    "own plugin": ("A plugin of your own: clipping that adapts", 1),
    "vanishing_gradient": ("Findings of forge doctor", 1),
}
"""What people type, and a title that must be among so many first results: for a job or a finding of the doctor, the
very first."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=REPO, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.browser.watched import chromium

    with chromium() as opened:
        yield opened


@pytest.mark.parametrize("query", WANTED)
def test_the_search_works_from_the_disk(site: Path, browser: Any, query: str) -> None:
    page, said = opened(browser, site / "index.html")
    titles, (title, most) = search(page, query), WANTED[query]
    assert title in titles[:most], titles[:8]
    assert said == []


def test_the_search_is_not_drowned_by_sources(site: Path, browser: Any) -> None:
    page, _ = opened(browser, site / "index.html")
    for query in ("benchmark", "lightning", "loader"):
        assert search(page, query)
        links = page.locator(".md-search-result__item > a").evaluate_all("links => links.map(link => link.href)")
        assert [link for link in links if "/source/" in link and "CHANGELOG" not in link] == []


def test_a_result_opens_its_page(site: Path, browser: Any) -> None:
    page, said = opened(browser, site / "index.html")
    search(page, "images in folders")
    page.locator(".md-search-result__item > a").first.click()
    page.wait_for_url("**/images-in-folders.html*")
    assert page.locator("h1").inner_text().startswith("Images in folders")
    assert said == []


def test_every_page_shows_the_version(site: Path, browser: Any) -> None:
    for name in ("index.html", "plugins/clip.html"):
        page, _ = opened(browser, site / name)
        assert page.locator("header .version").inner_text() == __version__
        assert __version__ in page.locator("footer").inner_text()


def opened(browser: Any, path: Path) -> tuple[Any, list[str]]:
    """A page from the disk, and what it complained of or asked of other machines."""
    said: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
    page.goto(path.as_uri())
    return page, said


def search(page: Any, query: str) -> list[str]:
    """Type into the search, and return the titles of what it found."""
    page.locator(".md-search__input").click()
    page.locator(".md-search__input").fill("")
    page.locator(".md-search__input").press_sequentially(query)
    page.wait_for_function("document.querySelector('.md-search-result__meta').innerText.match(/matching/)")
    page.wait_for_timeout(100)
    return page.locator(".md-search-result__item > a h1").all_inner_texts()
