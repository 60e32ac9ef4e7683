"""A third party's plugins take part wherever forge's own do, under names that forge has never heard of."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import forge
from forge import registry
from forge.config.build import make_plugins, plugin_class
from forge.contract.plugin import Plugin
from forge.errors import ForgeError
from forge.report.page import page
from forge.runs.folder import RunFolder
from forge.snapshot.left_out import is_left_out
from forge.testing import TinyTask, check_plugin, fit_tiny, tiny_batches
from forge.tuning.trial import TuningTrial, run_trial

THEIRS = '''
import forge
from forge.planning.strategies import row


class TheirClip(forge.Plugin):
    """Bound each gradient."""

    provides = ("clip",)
    charts = {"clipping/largest gradient": r"their_clip/largest"}
    cures = {"non_finite": "-p {name} bounds every gradient.", "memory": "-p {name}, if only"}
    example = {}
    ran = 0

    @forge.hookimpl
    def forge_edit_grads(self, step):
        type(self).ran += 1
        step.record("their_clip/largest", max(p.grad.abs().max() for p in step.parameters()))
        for parameter in step.parameters():
            parameter.grad.clamp_(-0.1, 0.1)


class TheirStop(forge.Plugin):
    """End a run."""

    cures = {"endless": "the plugin {name}"}


class TheirSaver(forge.Plugin):
    """Keep less."""

    provides = ("their_memory",)
    cures = {"activations": "-p {name}"}

    @classmethod
    def for_plan(cls, given, task):
        return "{name} saves nothing here." if task is None else given


class TheirPlan(forge.Plugin):
    """Divide a model."""

    provides = ("strategy",)
    cures = {"processes": "-p {name}"}


def rows(name, step):
    for levers, f in step.share.items():
        yield row(name, levers, f, 0, plugins={name: {"parts": step.devices}})
'''
ENTRIES = """
[forge.plugins]
their_clip = their_plugins:TheirClip
their_plan = their_plugins:TheirPlan
their_saver = their_plugins:TheirSaver
their_stop = their_plugins:TheirStop
[forge.strategies]
their_plan = their_plugins:rows
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package of plugins."""
    folder = tmp_path_factory.mktemp("theirs")
    info = folder / "their_plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-plugins\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    (folder / "their_plugins.py").write_text(THEIRS)
    return folder


@pytest.fixture
def theirs(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """The package is installed here; the function loads one of its plugins."""
    monkeypatch.syspath_prepend(package)
    registry.installed.cache_clear()
    yield lambda name: registry.load("plugin", name)
    sys.modules.pop("their_plugins", None)
    registry.installed.cache_clear()


@pytest.mark.slow
def test_planning_tries_their_strategy_and_their_lever(package: Path, run_forge: Any) -> None:
    """In a process of its own: threads of `forge plan` would be in the way of tests that fork."""
    done = run_forge("plan", "quickstart", "--devices", "2", "--memory", "0.0785", "--json", paths=[package])
    assert done.returncode == 0, done.stderr
    found, recommended = (json.loads(done.stdout)[key] for key in ("rows", "recommended"))
    rows = {(row["strategy"], row["their_saver"], row["amp"]) for row in found}
    assert {("their_plan", False, False), ("their_plan", True, True), ("ddp", True, False)} <= rows
    their = next(row for row in found if row["strategy"] == "their_plan")
    assert their["peak"] < min(row["peak"] for row in found if row["strategy"] != "their_plan")

    assert recommended["strategy"] == "their_plan"
    assert recommended["command"] == "forge fit quickstart --nproc 2 -p their_plan their_plan.parts=2"


def test_a_trial_runs_their_clip_and_not_their_stop(theirs: Any) -> None:
    clip, stop = theirs("their_clip"), theirs("their_stop")
    run_trial(TuningTrial(), TinyTask, tiny_batches, updates=3, plugins=[clip(), stop()])
    assert clip.ran == 3
    assert not is_left_out(clip())
    assert is_left_out(stop())


def test_a_report_draws_their_chart(theirs: Any, tmp_path: Path) -> None:
    fit_tiny([theirs("their_clip")(), "jsonl"], max_updates=4, log_every=1, run_dir=tmp_path / "run")
    text = page([RunFolder(tmp_path / "run")])
    assert "clipping: largest gradient" in text


def test_messages_name_their_plugins(theirs: Any) -> None:
    assert "-p their_plan" in registry.cures("processes")
    assert "-p their_clip bounds every gradient." in registry.cures("non_finite")
    assert "-p their_clip, if only" in registry.cures("memory")
    assert "-p their_clip, if only" not in registry.cures("memory", beside=make_plugins(["clip"])), "its place is taken"
    with pytest.raises(ForgeError, match=r"max_time, or the plugin early_stop, or the plugin their_stop, neither"):
        forge.Trainer(plugins=[]).fit(TinyTask(), tiny_batches())


@pytest.mark.slow
def test_the_kit_runs_others_beside_their_clip(theirs: Any) -> None:
    assert registry.declared("example")["their_clip"] == {}
    clip = theirs("their_clip")
    check_plugin(theirs("their_saver"))
    assert clip.ran > 0


@pytest.mark.parametrize("what", ["provides", "cures", "charts", "example", "axes"])
def test_what_is_read_from_the_source_is_what_the_class_has(what: str) -> None:
    read = registry.declared(what)
    for name in registry.installed("plugin"):
        assert read.get(name, getattr(Plugin, what)) == getattr(plugin_class(name), what), name


# -- forge's own plugins, under other names ---------------------------------------------------------------------------

REAL = registry.installed


def under_other_names(kind: str) -> dict[str, EntryPoint]:
    entries = REAL(kind)
    if kind not in ("plugin", "strategy"):
        return entries
    return {f"x_{name}": EntryPoint(f"x_{name}", entry.value, entry.group) for name, entry in entries.items()}


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plugin is installed as `x_NAME`: what works now asks for nothing by name."""
    monkeypatch.setattr(registry, "installed", under_other_names)


@pytest.mark.usefixtures("renamed")
def test_settings_and_messages_know_no_name() -> None:
    assert fit_tiny([], max_epochs=None, max_time="1 h", max_updates=3)[1].updates == 3
    assert fit_tiny([], max_epochs=9, smoke=True)[1].updates == 2
    assert registry.cures("memory") == ["-p x_amp, for activations in half precision"]
    assert registry.cures("best") == ["x_checkpoint.best={monitor: val/loss, mode: min}"]


@pytest.mark.usefixtures("renamed")
def test_a_trial_leaves_out_what_stops_or_saves_by_any_name() -> None:
    made = make_plugins({"x_clip": {}, "x_guard": {}, "x_checkpoint": {}, "x_early_stop": {}, "x_limit": {"train": 1}})
    assert [plugin.name for plugin in made if not is_left_out(plugin)] == ["x_clip", "x_limit"]
