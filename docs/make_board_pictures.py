"""Write docs/pictures/board-*.png: TensorBoard over real runs, as Chromium shows it.

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

from tests.browser.watched import PATIENCE, Watched, board, chromium, make_runs  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
EPOCHS = 12


def keep(watched: Watched, name: str) -> None:
    """Save a screenshot, in few colours to keep the file small."""
    watched.page.wait_for_timeout(1000)  # curves and points move into their places
    shown = Image.open(io.BytesIO(watched.page.screenshot())).convert("RGB")
    shown.quantize(192).save(PICTURES / f"board-{name}.png", optimize=True)
    watched.page.close()
    assert not watched.errors, watched.errors


def curves(browser: Browser, address: str) -> None:
    """CUSTOM SCALARS: training against validation."""
    watched = Watched.of(browser, address)
    page = watched.open("custom_scalars&_smoothingWeight=0")
    expect(page.get_by_text("Matches (6)").first).to_be_visible()
    keep(watched, "curves")


def images(browser: Browser, address: str) -> None:
    """IMAGES: confusion matrices and mistakes."""
    watched = Watched.of(browser, address)
    page = watched.open("images&tagFilter=confusion%7Cmistakes")
    expect(page.locator("tf-image-loader img").first).to_be_visible()
    keep(watched, "images")


def points(browser: Browser, address: str) -> None:
    """PROJECTOR: the last hidden layer for each digit."""
    watched = Watched.of(browser, address)
    page = watched.open("projector")
    inside = page.frame_locator("iframe").frame_locator("iframe")
    expect(inside.get_by_text("2 runs found")).to_be_visible()
    page.wait_for_timeout(2000)
    keep(watched, "points")


def table(browser: Browser, address: str) -> None:
    """HPARAMS: the options that differ between runs, and their results."""
    watched = Watched.of(browser, address, width=1800, height=400)
    page = watched.open("hparams")
    expect(page.locator("tf-hparams-table-view").get_by_text("val/loss", exact=True).first).to_be_visible()
    keep(watched, "table")


def card(browser: Browser, address: str) -> None:
    """TEXT: the run card."""
    watched = Watched.of(browser, address)
    page = watched.open("text&tagFilter=card")
    expect(page.get_by_text("Stack, outermost first").first).to_be_visible()
    keep(watched, "card")


def main() -> None:
    expect.set_options(timeout=PATIENCE)
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        make_runs(Path(folder), EPOCHS)
        with board(Path(folder)) as address, chromium() as browser:
            for picture in (curves, images, points, table, card):
                picture(browser, address)


if __name__ == "__main__":
    main()
