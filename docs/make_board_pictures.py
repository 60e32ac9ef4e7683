"""Write docs/pictures/board-*.png and report-15-runs.png: TensorBoard and a report over real runs, as Chromium shows.

    python docs/make_board_pictures.py

Needs Chromium and playwright, as `make test-browser` does. Look at the pictures before you commit them.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, expect

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import forge  # noqa: E402
from forge.report.page import page  # noqa: E402
from forge.runs.folder import RunFolder  # noqa: E402
from forge_recipes.digits import DigitsMLP, digits  # noqa: E402
from tests.browser.watched import MILLISECONDS, Watched, board, chromium, make_runs  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
EPOCHS = 12


def keep(watched: Watched, name: str) -> None:
    """Save a screenshot, in few colours to keep the file small."""
    watched.page.wait_for_timeout(1000)  # curves and points move into their places
    shown = Image.open(io.BytesIO(watched.page.screenshot())).convert("RGB")
    shown.quantize(192).save(PICTURES / f"{name}.png", optimize=True)
    watched.page.close()
    assert not watched.errors, watched.errors


def curves(browser: Browser, address: str) -> None:
    """CUSTOM SCALARS: training against validation."""
    watched = Watched.of(browser, address)
    page = watched.open("custom_scalars&_smoothingWeight=0")
    expect(page.get_by_text("Matches (6)").first).to_be_visible()
    keep(watched, "board-curves")


def images(browser: Browser, address: str) -> None:
    """IMAGES: confusion matrices and mistakes."""
    watched = Watched.of(browser, address)
    page = watched.open("images&tagFilter=confusion%7Cmistakes")
    expect(page.locator("tf-image-loader img").first).to_be_visible()
    keep(watched, "board-images")


def points(browser: Browser, address: str) -> None:
    """PROJECTOR: the last hidden layer for each digit."""
    watched = Watched.of(browser, address)
    page = watched.open("projector")
    inside = page.frame_locator("iframe").frame_locator("iframe")
    expect(inside.get_by_text("2 runs found")).to_be_visible()
    page.wait_for_timeout(2000)
    keep(watched, "board-points")


def card(browser: Browser, address: str) -> None:
    """TEXT: the run card."""
    watched = Watched.of(browser, address)
    page = watched.open("text&tagFilter=card")
    expect(page.get_by_text("Stack, outermost first").first).to_be_visible()
    keep(watched, "board-card")


def report(browser: Browser, folder: Path) -> None:
    """`forge report` about many runs."""
    runs = [folder / f"run-{number:02d}" for number in range(15)]
    for number, run in enumerate(runs):
        options = {"hidden": 32 * 2 ** (number % 5), "dropout": number % 4 / 10, "lr": (1e-3, 3e-3, 1e-2)[number % 3]}
        trainer = forge.Trainer(
            plugins=["jsonl"], max_updates=160, seed=number, run_dir=run, log_every=20, device="cpu"
        )
        task, data = DigitsMLP(**options), digits()
        trainer.fit(task, data.train, data.val)
    (folder / "page.html").write_text(page([RunFolder(run) for run in runs]))
    watched = Watched.of(browser, "", width=1300, height=1800)
    watched.page.goto((folder / "page.html").as_uri())
    keep(watched, "report-15-runs")


def main() -> None:
    expect.set_options(timeout=MILLISECONDS)
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        make_runs(Path(folder), EPOCHS)
        with board(Path(folder)) as address, chromium() as browser:
            for picture in (curves, images, points, card):
                picture(browser, address)
            report(browser, Path(folder) / "many")


if __name__ == "__main__":
    main()
