"""The package of docs/writing-packages.md, installed: its formats, probe, lever and verb take part like forge's own.

And one whose entries are broken: each is named in one line, and stops nothing else.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import forge
from forge import registry
from forge.cli import main
from forge.errors import ForgeError
from forge.planning.strategies import DryStep, rows
from forge.runs.trained_task import Source
from forge.testing import TinyTask, tiny_batches
from forge_doctor.doctor import doctor
from forge_ship import bench, card
from forge_ship.engine import ExportError
from forge_ship.export import prepare
from forge_ship.export_formats import formats, module_of
from forge_ship.open_engine import open_engine
from forge_speed.levers import LeverSituation, levers
from forge_speed.step_facts import StepFacts
from tests.support.docs_pages import blocks
from tests.support.profiles import some

PAGE = "docs/writing-packages.md"
BROKEN = """
from forge_doctor import Finding
from forge_speed.levers import Change, Lever

ABOUT = (
    "a format "
    'that does nothing'
)
FILE, TOLERANCE = "model.bin", 0.0


def write(plan, path):
    path.write_bytes(b"")


def open_file(path, names, device):
    raise KeyError("cannot open")


def falls(patient):
    raise KeyError("cannot look")


def catastrophe(patient):
    yield Finding("the_end", "All is lost.", level="catastrophe")


def words(patient):
    yield "All is lost."


def silent(patient):
    pass


def pulls(situation):
    raise KeyError("cannot pull")


def exact(situation):
    yield Lever("exact", Change(), "exact")


def plans(name, step):
    raise KeyError("cannot plan")
"""
OTHERS = {
    "bare": "FILE, TOLERANCE = 'model.bin', 0.0",
    "needy": "from forge_broken import *; PACKAGES = ('nobody.has_this',)",
    "needy_extra": "from forge_broken import *; PACKAGES = ('nobody',); EXTRA = 'forge-broken[all]'",
    "unwritten": "from forge_broken import *\ndef write(plan, path):\n    raise KeyError('cannot write')",
    "forgetful": "from forge_broken import *\ndef write(plan, path): pass",
}
ENTRIES = """
[forge.export_formats]
unopened = forge_broken
lost = forge_broken.nowhere
{formats}
[forge.probes]
lost = forge_broken.nowhere:look
no function = forge_broken:FILE
falls = forge_broken:falls
catastrophe = forge_broken:catastrophe
words = forge_broken:words
silent = forge_broken:silent
bounds of the loss = forge_broken:falls
[forge.levers]
lost = forge_broken.nowhere:pull
pulls = forge_broken:pulls
exact = forge_broken:exact
[forge.strategies]
plans = forge_broken:plans
"""


@pytest.fixture(autouse=True)
def extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's files and entry points, on the path."""
    (tmp_path / "forge_extras").mkdir()
    (tmp_path / "forge_extras" / "__init__.py").write_text("")
    for block in blocks(PAGE, "python"):
        (place,) = re.findall(r"^# (\S+\.py)$", block.text, re.MULTILINE)
        (tmp_path / place).write_text(block.text)
    project = tomllib.loads(blocks(PAGE, "toml")[0].text)["project"]
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in entries.items()) for group, entries in groups]
    install(tmp_path, "forge_extras", "\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the proof runs in a process of its own
    monkeypatch.chdir(tmp_path)
    forget()
    yield
    forget()


@pytest.fixture
def broken(tmp_path: Path, extras: None) -> Iterator[None]:
    """A package beside it, of which nothing works."""
    folder = tmp_path / "forge_broken"
    folder.mkdir()
    (folder / "__init__.py").write_text(BROKEN)
    for name, text in OTHERS.items():
        (folder / f"{name}.py").write_text(text)
    install(tmp_path, "forge_broken", ENTRIES.format(formats="\n".join(f"{x} = forge_broken.{x}" for x in OTHERS)))
    forget()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "forge_broken"]:
        del sys.modules[name]


def install(folder: Path, name: str, entries: str) -> None:
    info = folder / f"{name}-0.1.0.dist-info"
    info.mkdir()
    dashed = name.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {dashed}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(entries)


def forget() -> None:
    for cached in (registry.installed, registry.libraries, registry._warn_once, registry._tree):
        cached.cache_clear()


def test_its_formats_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert formats()["npz"] == "weights alone, as a file that numpy reads"
    assert main(["export", "--help"]) == 0
    assert "  npz                weights alone, as a file that numpy reads\n" in capsys.readouterr().out


def test_its_program_is_written_and_run(tmp_path: Path) -> None:
    """Examples are ordinary tensors: torch.export takes no tensors of an inference."""
    prepared = prepare(Source(TinyTask().eval()), tiny_batches(), "cpu")
    plan, format = prepared.plan(), module_of("packed")
    assert not any(x.is_inference() for x in plan.examples)
    format.write(plan, tmp_path / "model.xz")
    (call,) = prepared.interface.calls[:1]
    found = format.open_file(tmp_path / "model.xz", list(plan.inputs), "cpu")(list(call.inputs.values()))
    torch.testing.assert_close(list(found), list(call.outputs.values()))


@pytest.mark.slow
def test_a_program_is_exported_with_proof_and_served(tmp_path: Path) -> None:
    made = forge.export(TinyTask(), to="packed", out=tmp_path / "out", data=tiny_batches())
    assert made.path == tmp_path / "out" / "model.xz"
    assert open_engine(made.path).inputs[0].shape[0] == "batch"


def test_its_probe_finds_what_it_looks_for() -> None:
    class Flat(TinyTask):
        pass

    x, y = torch.ones(64, 4), torch.arange(64) % 2
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    report = doctor(Flat(), data)
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
    assert ["hello", "Say which plugins a recipe runs."] in [
        line.strip().split(maxsplit=1) for line in look.splitlines()
    ]
    assert main(["hello", "quickstart"]) == 0
    assert "clip" in capsys.readouterr().out


# -- a package of which nothing works ---------------------------------------------------------------------------------


def test_broken_probes_are_skipped_by_name(broken: None) -> None:
    report = doctor(TinyTask(), tiny_batches())
    assert "the run" not in report.skipped
    assert "spread of the inputs" in report.good
    assert "bounds of the loss" in report.good  # forge's own of that name has run, too
    shared = report.skipped.pop("bounds of the loss (forge-broken 0.1.0)")
    assert shared.startswith("The probe 'bounds of the loss' of forge-broken 0.1.0 failed: KeyError")
    assert report.skipped.keys() == registry.installed("probe").keys() - {"spread of the inputs", "bounds of the loss"}
    for name, why in report.skipped.items():
        assert why.startswith(f"The probe {name!r} of forge-broken 0.1.0 "), why
        assert why.endswith(" Repair or uninstall that package."), why
    assert re.search(r"failed: KeyError: 'cannot look' \(\S*forge_broken/__init__.py:\d+\)\.", report.skipped["falls"])
    assert "No module named 'forge_broken.nowhere'" in report.skipped["lost"]
    assert "level='catastrophe': choose from error, warning, note" in report.skipped["catastrophe"]
    assert "it yields a str, which is no Finding" in report.skipped["words"]
    assert "'NoneType' object is not iterable" in report.skipped["silent"]
    assert "forge_broken:FILE is of type str, without __call__" in report.skipped["no function"]


def test_broken_levers_are_left_out_by_name(broken: None, caplog: pytest.LogCaptureFixture) -> None:
    found = levers(LeverSituation(StepFacts(), given={"clip": {}}))
    assert "no clip" in {lever.name for lever in found}
    said = caplog.messages
    assert [line.split(" of ")[0] for line in said] == ["The lever 'exact'", "The lever 'lost'", "The lever 'pulls'"]
    assert all(
        " of forge-broken 0.1.0 " in line and line.endswith("Repair or uninstall that package.") for line in said
    )
    assert "numbers='exact': choose from bitwise, rounding, precision" in said[0]


def test_a_broken_strategy_is_left_out_by_name(broken: None, caplog: pytest.LogCaptureFixture) -> None:
    rows(DryStep({}, {}, 2))
    assert "The strategy 'plans' of forge-broken 0.1.0 failed: KeyError: 'cannot plan'" in caplog.text


@pytest.mark.parametrize(
    ("format", "said"),
    some(
        [
            ("bare", "of forge-broken 0.1.0 is malformed .* without write and open_file or read_file"),
            ("lost", "of forge-broken 0.1.0 cannot be imported"),
            ("needy", "needs nobody.has_this: pip install nobody.has_this$"),
            ("needy_extra", r"needs nobody: pip install 'forge-broken\[all\]'$"),
            (
                "unwritten",
                r"of forge-broken 0.1.0 failed to write model.bin: KeyError: 'cannot write' \(\S*:3\)\. Repair",
            ),
            ("forgetful", r"failed to write model.bin: FileNotFoundError: .* is not there\. Repair"),
            (
                "unopened",
                r"of forge-broken 0.1.0 failed to open model.bin: KeyError: 'cannot open' \(\S*:\d+\)\. Repair",
            ),
        ],
        quick=6,
    ),
)
def test_a_broken_format_is_named_and_leaves_nothing(format: str, said: str, broken: None, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=said) as caught:
        forge.export(TinyTask(), to=format, out=tmp_path / "out" / "deep" / "model.bin", data=tiny_batches())
    assert f"format {format}" in str(caught.value).replace("'", "")
    assert not (tmp_path / "out").exists()


def test_a_file_of_a_broken_format_is_named(broken: None, tmp_path: Path) -> None:
    made = forge.export(TinyTask(), to="torchscript", out=tmp_path / "model.bin.ts", data=tiny_batches())
    file = made.path.rename(tmp_path / "model.bin")
    files = {file.name: made.card["files"][made.path.name]}
    card.place_of(file).write_text(json.dumps({**made.card, "format": "unopened", "files": files}))
    with pytest.raises(ExportError, match=r"model.bin cannot be loaded: The format 'unopened' .* 'cannot open' \("):
        open_engine(file)


def test_a_broken_format_does_not_stop_other_engines(broken: None) -> None:
    source = Source(TinyTask())
    found = bench.bench(source, tiny_batches(), engines=["eager", "lost"], batches=[1], seconds=0.01)
    assert {timing.engine for timing in found.timings} == {"eager"}
    assert found.missing.keys() == {"lost"}
    with pytest.raises(ExportError, match=r"model\.npz holds weights alone"):
        bench.bench(source, tiny_batches(), engines=["npz"])
