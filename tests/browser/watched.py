"""Real runs, a real TensorBoard over them, and Chromium looking at it, for the pictures of the docs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, sync_playwright

from tests.support.patience import PATIENCE

LOOKING = Path(__file__).with_name("looking.py")
FORGE, TENSORBOARD = (Path(sys.executable).with_name(name) for name in ("forge", "tensorboard"))
PLUGINS = ("monitor", "profiler")
MILLISECONDS = int(1000 * PATIENCE)
"""Milliseconds for a page to show what it has to show."""


def forge(*words: str, cwd: Path) -> None:
    """Run the command line to its end."""
    done = subprocess.run(
        [FORGE, *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr


def make_runs(folder: Path, epochs: int = 4) -> dict[str, Path]:
    """Train in `folder`: the quickstart once, and twice a task that logs pictures, texts and points.

    Return the run folders by their names in TensorBoard.
    """
    shutil.copy(LOOKING, folder / "looking.py")
    plugins = [word for name in PLUGINS for word in ("-p", name)]
    common = [
        *plugins,
        f"trainer.max_epochs={epochs}",
        "trainer.log_every=5",
        "monitor.every=20 updates",
        "monitor.histograms=true",
        "trainer.device=cpu",
    ]
    forge("fit", "quickstart", *common, "--run-dir", "runs/quickstart/first", cwd=folder)
    for name, hidden in (("small", 32), ("large", 128)):
        own = ["-p", "clip", "-p", "schedule", f"task.hidden={hidden}", "--run-dir", f"runs/looking/{name}"]
        forge("fit", "looking.py:Looking", *common, *own, cwd=folder)
    return {
        f"{path.parent.relative_to(folder / 'runs')}/tensorboard": path.parent
        for path in folder.glob("runs/*/*/card.json")
    }


@contextmanager
def board(folder: Path) -> Iterator[str]:
    """The address of a TensorBoard over the runs of a folder."""
    words = [TENSORBOARD, "--logdir", "runs", "--port", "0", "--samples_per_plugin", "scalars=10000,images=100"]
    process = subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = next(found[0] for line in process.stderr if (found := re.findall(r"http://\S+", line)))
        _wait_for(address, len(list(folder.glob("runs/*/*/tensorboard"))))
        yield address
    finally:
        process.kill()
        process.communicate()


def _wait_for(address: str, runs: int) -> None:
    """Until TensorBoard has read something of every run, which it does not announce."""
    deadline = time.monotonic() + PATIENCE
    while len(json.load(urlopen(f"{address}data/runs"))) < runs:
        assert time.monotonic() < deadline, "TensorBoard has not found the runs"
        time.sleep(0.1)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, or the one that FORGE_CHROMIUM names."""
    path = os.environ.get("FORGE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "There is no Chromium here. Install it (apt install chromium), or name it in FORGE_CHROMIUM."
    with sync_playwright() as playwright:
        # without a sandbox: containers have none to offer, and nothing but this machine's own pages is looked at
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page of the board, with everything that it complained of."""

    page: Page
    address: str
    errors: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, browser: Browser, address: str, width: int = 1280, height: int = 800) -> Watched:
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(MILLISECONDS)
        watched = cls(page, address)
        page.on("console", watched._said)
        page.on("pageerror", lambda error: watched.errors.append(str(error)))
        page.on("response", watched._answered)
        page.on("request", watched._asked)
        return watched

    def open(self, tab: str) -> Page:
        """Go to a tab of the board, and be there when its data is."""
        self.page.goto(f"{self.address}#{tab}")
        self.page.wait_for_load_state("networkidle")
        return self.page

    def _said(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(f"console: {message.text}")

    def _answered(self, response: Response) -> None:
        if response.status >= 400:
            self.errors.append(f"{response.status}: {response.url}")

    def _asked(self, request: Request) -> None:
        there, here = urlsplit(request.url), urlsplit(self.address)
        if there.scheme in ("http", "https", "ws", "wss") and there.netloc != here.netloc:
            self.errors.append(f"asked another machine: {request.url}")
