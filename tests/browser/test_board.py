"""TensorBoard as people see it: real runs, TensorBoard over them, and what a browser shows of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, expect

from tests.browser.watched import MILLISECONDS, Watched, board, chromium, forge, logged, make_runs

pytestmark = pytest.mark.browser

expect.set_options(timeout=MILLISECONDS)
LETTERS = """head => {
    const range = document.createRange();
    range.selectNodeContents(head);
    return range.getBoundingClientRect().right;
}"""
LOOKING = ("looking/large/tensorboard", "looking/small/tensorboard")
MAIN = ("train/loss", "train/accuracy", "val/loss", "val/accuracy", "lr", "grad_norm/before", "grad_norm/after")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Path]:
    return make_runs(folder)


@pytest.fixture(scope="module")
def address(folder: Path, runs: dict[str, Path]) -> Iterator[str]:
    with board(folder) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def watched(browser: Browser, address: str) -> Iterator[Watched]:
    """A page of its own, which must not have complained of anything in the end."""
    found = Watched.of(browser, address)
    yield found
    errors = list(found.errors)
    found.page.close()
    assert not errors


def same_points(drawn: list[Any], expected: list[tuple[int, float | None]]) -> None:
    """The updates exactly; the values as far as the four bytes that TensorBoard keeps of a number go."""
    assert [step for step, _ in drawn] == [update for update, _ in expected]
    for (_, value), (_, truth) in zip(drawn, expected, strict=True):
        assert value == pytest.approx(truth, rel=1e-6)


def test_scalars_have_the_points_of_metrics_jsonl(watched: Watched, runs: dict[str, Path]) -> None:
    page = watched.open("scalars&tagFilter=%5E(train%7Cval%7Cgrad_norm)%2F%7C%5Elr&_smoothingWeight=0")
    for name in MAIN:
        expect(page.locator("tf-scalar-card").get_by_text(name, exact=True).first).to_be_visible()
    curves = watched.curves()
    truth = {run: logged(path) for run, path in runs.items()}
    assert {(run, name) for run in runs for name in MAIN} <= curves.keys()
    for (run, name), points in curves.items():
        same_points(points, truth[run][name])


def test_a_curve_is_drawn_through_all_of_its_points(watched: Watched, runs: dict[str, Path]) -> None:
    page = watched.open("scalars&tagFilter=%5Etrain%2Floss%24&_smoothingWeight=0")
    card = page.locator("tf-scalar-card").filter(has_text="train/loss").first
    lines = card.locator("svg path.line")
    expect(lines).to_have_count(len(runs))
    count = len(logged(runs["quickstart/first/tensorboard"])["train/loss"])
    through = re.compile(rf"^M[^ML]+(L[^ML]+){{{count - 1}}}$")
    for line in lines.all():
        expect(line).to_have_attribute("d", through)


def test_the_first_page_shows_runs_and_groups_of_metrics(watched: Watched) -> None:
    page = watched.open("timeseries")
    for run in (*LOOKING, "quickstart/first/tensorboard"):
        expect(page.get_by_text(run, exact=True).first).to_be_visible()
    for group in ("grad_norm", "ledger", "lr", "monitor", "throughput", "train", "val"):
        expect(page.get_by_text(group, exact=True).first).to_be_attached()


def test_custom_scalars_shows_the_charts_of_the_layout(watched: Watched) -> None:
    page = watched.open("custom_scalars")
    for section in ("training and validation", "learning rate", "gradient norm", "plugin ledger", "throughput"):
        expect(page.get_by_text(section, exact=True).first).to_be_attached()
    for title in ("loss", "accuracy", "before and after clipping", "samples per second", "step time, in ms"):
        expect(
            page.locator("tf-custom-scalar-multi-line-chart-card").get_by_text(title, exact=True).first
        ).to_be_attached()
    loss = page.locator("tf-custom-scalar-multi-line-chart-card").filter(has=page.get_by_text("loss", exact=True)).first
    expect(loss.get_by_text("Matches (6)")).to_be_visible()  # training and validation of three runs


def test_images_show_predictions_mistakes_and_confusion(watched: Watched) -> None:
    page = watched.open("images")
    for name in ("val/predictions", "val/mistakes", "val/confusion"):
        expect(page.get_by_text(name).first).to_be_attached()
    picture = page.locator("tf-image-loader img").first
    expect(picture).to_be_visible()
    page.wait_for_function("picture => picture.naturalWidth > 100", arg=picture.element_handle())


def test_text_has_the_run_card_notes_model_and_profile(watched: Watched) -> None:
    page = watched.open("text")
    expect(page.locator("tf-text-loader").first.get_by_text("tag: card")).to_be_visible()
    expect(page.get_by_text("Stack, outermost first").first).to_be_visible()
    for name in ("model", "memory", "profile"):
        expect(page.get_by_text(name, exact=True).first).to_be_attached()


def test_hparams_is_a_table_of_the_runs(browser: Browser, address: str) -> None:
    watched = Watched.of(browser, address, width=2600)
    page = watched.open("hparams")
    table = page.locator("tf-hparams-table-view")
    for run in (*LOOKING, "quickstart/first/tensorboard"):
        expect(table.get_by_text(run, exact=True).first).to_be_visible()
    assert not watched.errors
    page.close()


def test_the_projector_loads_the_points_with_labels_and_pictures(watched: Watched, runs: dict[str, Path]) -> None:
    (vectors,) = runs[LOOKING[0]].glob("tensorboard/projector/*/vectors.tsv")
    count = len(vectors.read_text().splitlines())
    page = watched.open("projector")
    inside = page.frame_locator("iframe").frame_locator("iframe")
    expect(inside.get_by_text(f"Points: {count}")).to_be_visible()
    expect(inside.get_by_text("2 runs found")).to_be_visible()
    asked = [answer.url for answer in watched.answers]
    for what in ("tensor", "metadata", "sprite_image"):
        assert any(f"/projector/{what}?" in url for url in asked), what


def test_histograms_show_the_distributions_of_the_monitor(watched: Watched) -> None:
    page = watched.open("histograms")
    expect(page.get_by_text("monitor", exact=True).first).to_be_visible()


def test_a_report_opens_without_any_network(browser: Browser, folder: Path, runs: dict[str, Path]) -> None:
    forge("report", str(runs["looking/small/tensorboard"]), "-o", "report.html", cwd=folder)
    watched = Watched.of(browser, "file:")
    watched.page.context.set_offline(True)
    watched.page.goto((folder / "report.html").as_uri())
    expect(watched.page.locator("svg").first).to_be_visible()
    assert [answer.url for answer in watched.answers] == [(folder / "report.html").as_uri()]
    assert not watched.errors
    watched.page.close()
