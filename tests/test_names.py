"""No file of the core names a plugin or a package in a string: it asks what the installed ones declare."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.house import PACKAGES, REPO

WORDS = {
    "accumulate": "what gradients do",
    "anomaly": "a mode of torch",
    "checkpoint": "a kind of request, and a folder",
    "clip": "what happens to gradients",
    "compile": "a phase of forge_build_model",
    "csv": "a format of files",
    "duration": "of a run",
    "freeze": "what happens to parameters, and to a stack",
    "guard": "what some plugins do",
    "kernels": "functions of a device",
    "limit": "an argument",
    "monitor": "the metric that a best checkpoint goes by",
    "pipeline": "an attribute of a loader, and a way to train",
    "prefetch": "an option of loaders",
    "profiler": "of torch",
    "progress": "the counters of a run",
    "remat": "a phase of forge_build_model",
    "schedule": "of learning rates",
    "spans": "RUN/spans.json, and times of hooks",
    "system": "of files, and of a machine",
    "tensorboard": "a library, and RUN/tensorboard",
    "validate_first": "a setting of the Trainer",
    "wandb": "a library",
    "zero": "a number",
}
"""Names of plugins that are words of forge's own, and what they mean there: in a sentence, or as a key."""
LOOKED_UP = re.compile(r'\.(stack|plugins|provides)\b|"plugin"|registry\.')
"""A line with such a word looks up what its strings say."""


@cache
def projects() -> list[dict[str, Any]]:
    files = [REPO / "pyproject.toml", *sorted((REPO / "plugins").glob("forge_*/pyproject.toml"))]
    return [tomllib.loads(file.read_text())["project"] for file in files]


@cache
def plugins() -> set[str]:
    return {name for project in projects() for name in project.get("entry-points", {}).get("forge.plugins", ())}


@cache
def packages() -> set[str]:
    """Packages around the core, by the names they are imported and installed by; `forge-trainer` is the core's own."""
    return {*(PACKAGES.keys() - {"forge"}), "forge_recipes", *(project["name"] for project in projects()[1:])}


@cache
def any_of_them() -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, (*plugins(), *packages()))))


def named(text: str, line: str = "") -> Iterator[str]:
    """Yield the plugins and packages that a string names; `line` is the line of source that it begins in."""
    if not any_of_them().search(text):
        return
    for name in sorted(name for name in plugins() if name in text):
        word = rf"(?<![\w.\-]){re.escape(name)}"
        if name not in WORDS:
            forms = [rf"{word}(?!\w)"]
        else:
            forms = [rf"-p (?:no:)?{name}\b", rf"\bplugins?[ .:]+['\"`{{]*{name}\b", rf"{word}\.\w+=", rf"{word}@"]
            forms += [rf"\A{name}\Z"] if LOOKED_UP.search(line) else []
        if any(re.search(form, text) for form in forms):
            yield name
    yield from (name for name in sorted(packages()) if re.search(rf"(?<!\w){name}(?!\w)", text))


def places(file: Path) -> Iterator[str]:
    """Yield "file:line: what" of every string that names one."""
    source = file.read_text()
    lines, strings = source.splitlines(), [(1, source)]
    if file.suffix == ".py":
        nodes = ast.walk(ast.parse(source))
        strings = [(n.lineno, n.value) for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    for number, text in strings:
        for name in named(text, lines[number - 1] if file.suffix == ".py" else ""):
            yield f"{file.relative_to(REPO)}:{number}: {name}"


def test_no_string_of_the_core_names_a_plugin_or_a_package() -> None:
    core = [path for path in sorted((REPO / "forge").rglob("*")) if path.suffix in (".py", ".html", ".txt")]
    assert len(core) > 200
    assert len(plugins()) > 40
    assert plugins() >= WORDS.keys()
    assert [place for file in core for place in places(file)] == []


def test_a_name_is_found_however_it_is_written() -> None:
    written = [
        "ema",
        "x: fsdp",
        "-p clip",
        "-p no:checkpoint",
        "clip.max_norm=1",
        "the plugin schedule",
        "plugins.clip",
    ]
    for text in written:
        assert list(named(text)), text
    assert list(named("pip install forge-doctor"))
    assert list(named("progress", 'shown = "progress" in trainer.stack'))
    for text in ("a checkpoint of the schedule", "metrics.jsonl", "torch.backends.cudnn", "progress"):
        assert not list(named(text)), text
