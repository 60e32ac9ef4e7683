"""The package of docs/writing-packages.md, installed: its format, probe, lever and verb take part like forge's own."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import forge
from forge import registry
from forge.cli import main
from forge.testing import TinyTask, tiny_batches
from forge_doctor.doctor import doctor
from forge_ship.export_formats import formats
from forge_speed.levers import LeverSituation, levers
from forge_speed.step_facts import StepFacts
from tests.support.docs_pages import blocks

PAGE = "docs/writing-packages.md"


@pytest.fixture(autouse=True)
def extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's files and entry points, on the path."""
    (tmp_path / "forge_extras").mkdir()
    (tmp_path / "forge_extras" / "__init__.py").write_text("")
    for block in blocks(PAGE, "python"):
        (place,) = re.findall(r"^# (\S+\.py)$", block.text, re.MULTILINE)
        (tmp_path / place).write_text(block.text)
    project = tomllib.loads(blocks(PAGE, "toml")[0].text)["project"]
    info = tmp_path / "forge_extras-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: forge-extras\nVersion: 0.1.0\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in entries.items()) for group, entries in groups]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the proof runs in a process of its own
    monkeypatch.chdir(tmp_path)
    registry.installed.cache_clear()
    registry.libraries.cache_clear()
    yield
    registry.installed.cache_clear()
    registry.libraries.cache_clear()


def test_its_format_is_listed() -> None:
    assert formats()["npz"] == "weights alone, as a file that numpy reads"


@pytest.mark.slow
def test_a_task_is_exported_with_proof(tmp_path: Path) -> None:
    made = forge.export(TinyTask(), to="npz", out=tmp_path / "out" / "model.npz", data=tiny_batches())
    assert made.path.name == "model.npz"
    import numpy

    assert set(numpy.load(made.path)) == set(TinyTask().state_dict())


def test_its_probe_finds_what_it_looks_for() -> None:
    class Flat(TinyTask):
        pass

    x, y = torch.ones(64, 4), torch.arange(64) % 2
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    report = doctor(Flat(), data, budget=0)
    (found,) = [finding for finding in report.findings if finding.name == "constant_inputs"]
    assert (found.level, found.cure) == ("error", "Look at what the data set reads.")


def test_its_lever_is_among_those_that_are_tried() -> None:
    facts = StepFacts()
    (there,) = [x for x in levers(LeverSituation(facts, given={"clip": {}})) if x.name == "no clip"]
    (not_there,) = [x for x in levers(LeverSituation(facts)) if x.name == "no clip"]
    assert (there.why_not, not_there.why_not) == ("", "your stack has no clip")


def test_its_verb_is_helped_with_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    look = capsys.readouterr().out.split("\nlook\n")[1].split("\ncheck\n")[0]
    assert "hello          Say which plugins a recipe runs." in look
    assert main(["hello", "quickstart"]) == 0
    assert "clip" in capsys.readouterr().out
