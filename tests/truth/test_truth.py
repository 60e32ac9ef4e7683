"""Nothing that users had at commit 8164eb8 is lost: names, options and files. record.py says how it was recorded."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge import cli
from tests.support.docs_pages import load_script
from tests.truth import kept_runs, record, surface

HERE = Path(__file__).resolve().parent

# ---------------------------------------------------------------------------------------------------------------------
# What can be named


def recorded() -> dict[str, set[str]]:
    kinds: dict[str, set[str]] = {}
    for line in (HERE / "surface.txt").read_text(encoding="utf-8").splitlines():
        kinds.setdefault(line.partition(" ")[0], set()).add(line)
    return kinds


@cache
def collected() -> tuple[dict[str, set[str]], list[str]]:
    return surface.collect(set().union(*recorded().values()) - dropped().keys())


def dropped() -> dict[str, str]:
    lines = (HERE / "dropped.txt").read_text(encoding="utf-8").splitlines()
    return {line: reason for line, _, reason in (text.partition("  # ") for text in lines if text)}


def with_what_is_there(missing: set[str], now: set[str]) -> Iterator[str]:
    """The lines that are gone, each with the one that came in its place: a default or a type may have changed."""

    def subject(line: str) -> str:
        return line.partition(" = ")[0].partition(":")[0]

    changed = {subject(line): line for line in now}
    for line in sorted(missing):
        yield f"- {line}"
        if subject(line) in changed:
            yield f"+ {changed[subject(line)]}"


@pytest.mark.parametrize("kind", sorted(recorded().keys() - {"fixture", "import"}))
def test_what_could_be_named_still_can(kind: str) -> None:
    kinds, errors = collected()
    now = kinds.get(kind, set())
    missing = recorded()[kind] - now - dropped().keys()
    said = "\n".join(["lost, and not in dropped.txt:", *with_what_is_there(missing, now), *errors])
    assert not missing, said


def test_the_public_list_is_that_of_the_code() -> None:
    stability = load_script("make_stability")
    kinds, errors = collected()
    now, then = set(stability.listed(kinds)), set(stability.LIST.read_text(encoding="utf-8").splitlines()[1:])
    changed = [f"+ {line}" for line in sorted(now - then)]
    changed += [f"- {line}" for line in sorted(then - now) if not errors]  # where all could be looked at
    cure = "Say in CHANGELOG.md what users will see, then: python docs/make_stability.py"
    assert not changed, "\n".join([*changed, cure])


@pytest.mark.parametrize("line", sorted(recorded()["import"]))
def test_a_documented_import_still_works(line: str) -> None:
    if line in dropped():
        pytest.skip(dropped()[line])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # names the new place
        surface.import_line(line)


@pytest.mark.parametrize("line", sorted(recorded()["fixture"]))
def test_pytest_has_the_fixtures(line: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(line.removeprefix("fixture "))


def test_what_was_dropped_had_been_there_and_says_why() -> None:
    known = set().union(*recorded().values())
    for line, reason in dropped().items():
        assert line in known, f"dropped.txt: {line!r} is no line of surface.txt"
        assert reason, f"dropped.txt: {line!r} has no reason. Write: LINE  # REASON"


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    words = set(capsys.readouterr().out.split())
    verbs = {line.split()[1] for line in recorded()["verb"] - dropped().keys()}
    assert verbs <= words


# ---------------------------------------------------------------------------------------------------------------------
# What was written


@pytest.fixture(params=kept_runs.ALL)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "lightning":
        pytest.importorskip("lightning")
    return request.param


@pytest.fixture
def run(kind: str, empty_folder: Path) -> Path:
    """A copy of the folder that was kept."""
    shutil.copytree(kept_runs.FOLDER / kind / "run", empty_folder / kind / "run", symlinks=True)
    return empty_folder / kind / "run"


@pytest.fixture
def then(kind: str) -> dict[str, Any]:
    return json.loads((kept_runs.FOLDER / kind / "recorded.json").read_text(encoding="utf-8"))


def refuse_difference(now: Any, then: Any, tolerance: float, where: str = "") -> None:
    """Raise where something recorded is not there now, or is another value; what is new is no difference."""
    if isinstance(then, dict):
        assert isinstance(now, dict), where
        for key, value in then.items():
            assert key in now, f"{where}/{key} is missing"
            refuse_difference(now[key], value, tolerance, f"{where}/{key}")
    elif isinstance(then, list):
        assert isinstance(now, list), where
        assert len(now) == len(then), where
        for place, value in enumerate(then):
            refuse_difference(now[place], value, tolerance, f"{where}/{place}")
    elif isinstance(then, float):
        assert math.isclose(now, then, rel_tol=tolerance, abs_tol=tolerance / 10), f"{where}: {now}, was {then}"
    else:
        assert now == then, f"{where}: {now!r}, was {then!r}"


def refuse_another_end(kind: str, now: dict[str, Any], then: dict[str, Any]) -> None:
    refuse_difference(now, then, kept_runs.SINGLE if kind == "quickstart" else kept_runs.TOLERANCE)
    assert now["weights"].keys() == then["weights"].keys()


def test_a_run_that_was_cut_goes_on_and_ends_as_if_it_had_not(kind: str, run: Path, then: dict[str, Any]) -> None:
    refuse_another_end(kind, kept_runs.ending(kind, run, resume="auto"), then["ended"])


@pytest.mark.slow
def test_a_new_run_from_its_checkpoint_ends_there_too(
    kind: str, run: Path, then: dict[str, Any], tmp_path: Path
) -> None:
    (checkpoint,) = run.glob("checkpoints/update-*")
    now = kept_runs.ending(kind, tmp_path / "new", resume=checkpoint)
    kept = [line for line in then["ended"]["logged"] if line["update"] > kept_runs.CUT]
    now["logged"] = [line for line in now["logged"] if line["update"] > kept_runs.CUT]
    refuse_another_end(kind, now, {**then["ended"], "logged": kept})


@pytest.mark.slow
def test_a_run_from_its_start_ends_as_it_did(kind: str, then: dict[str, Any], tmp_path: Path) -> None:
    refuse_another_end(kind, kept_runs.ending(kind, tmp_path / "new"), then["ended"])


def test_weights_are_loaded_from_its_checkpoint(kind: str, run: Path, then: dict[str, Any]) -> None:
    task = kept_runs.make_task(kind)
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.fill_(7)
    forge.load_weights(task, run / "checkpoints" / "latest", weights="raw" if kind == "ema" else None)
    assert kept_runs.weights_of(task) == then["halfway"]


def test_commands_say_of_it_what_they_said(run: Path, then: dict[str, Any]) -> None:
    refuse_difference(record.said_of(run), then["said"], tolerance=0.0)


def test_every_byte_of_it_is_verified(run: Path) -> None:
    assert record.say("ckpt", "verify", str(run))
    (checkpoint,) = run.glob("checkpoints/update-*")
    damaged = next(checkpoint.glob("model*.safetensors"))
    *others, last = damaged.read_bytes()
    damaged.write_bytes(bytes([*others, last ^ 1]))
    assert cli.main(["ckpt", "verify", str(run)]) == 1


def test_its_page_is_written(run: Path, then: dict[str, Any]) -> None:
    record.say("report", str(run), "-o", "page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    (said,) = then["said"]["runs"]
    for word in (said["task"], *said["metrics"]):
        assert word in page, word
