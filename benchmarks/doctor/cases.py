"""The planted bugs and the healthy programs, and how one of them is examined."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.doctor.changes import HERE, Change, changes, written

SECONDS = 240
"""After which an examination is given up."""


def items(sets: list[str], only: list[str]) -> list[tuple[str, str]]:
    """Every (set, name)."""
    found = [(kind, name) for kind in sets for name in names(kind)]
    return [item for item in found if not only or item[1] in only]


def names(kind: str) -> list[str]:
    if kind == "bases":
        return sorted(path.stem for path in (HERE / "bases").glob("*.py"))
    return list(changes(kind))


def made(kind: str, name: str, folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """The task, its loaders, and more arguments of `forge.doctor`: a program is written into the folder."""
    change = Change(name, name, []) if kind == "bases" else changes(kind)[name]
    path = written(change, folder)
    own = loaded(path)
    recipe = {"recipe": path.with_suffix(".yaml")} if change.recipe else {}
    return own.Task(), own.data(), recipe


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def one(kind: str, name: str, how: str) -> dict[str, Any]:
    """Examine one; what goes wrong with that is part of the result."""
    import torch

    import forge

    torch.set_num_threads(1)
    row: dict[str, Any] = {"name": f"{kind}/{name}", "how": how, "findings": [], "error": "", "skipped": {}}
    try:
        with limited(SECONDS), tempfile.TemporaryDirectory() as folder, quiet():
            os.chdir(folder)
            forge.seed(0)
            task, splits, more = made(kind, name, Path(folder))
            row |= by_doctor(task, splits, more) if how == "doctor" else by_fit(task, splits, more)
            os.chdir(HERE)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    return row


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def give_up(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def by_doctor(task: Any, splits: Any, more: dict[str, Any]) -> dict[str, Any]:
    import forge

    report = forge.doctor(task, splits.train, splits.val, **more)
    found = [(finding.level, finding.name, finding.message) for finding in report.findings]
    return {"findings": found, "skipped": report.skipped, "seconds": round(report.seconds, 1)}


def two_epochs() -> Any:
    """A plugin that stops a fit after two epochs."""
    import forge

    class TwoEpochs(forge.Plugin):
        @forge.hookimpl
        def forge_step_end(self, step: Any) -> None:
            if step.trainer.progress.epoch >= 1 and step.index + 1 >= 2 * (step.trainer.updates_per_epoch or 1):
                step.trainer.request_stop("two epochs are enough", everywhere=True)

    plugin = TwoEpochs()
    plugin.name = "benchmarks.two_epochs"
    return plugin


def by_fit(task: Any, splits: Any, more: dict[str, Any]) -> dict[str, Any]:
    """What the first two epochs of ten, with the recipe `default` or its own, warn of by name, or refuse.

    A stream that cannot be continued is allowed: refusing it is about checkpoints, not about a mistake.
    """
    import forge

    planned = {key: value for key, value in more.items() if key == "recipe"}
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record)
    logging.getLogger("forge").addHandler(handler)
    found: list[tuple[str, str, str]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer = forge.Trainer(max_epochs=10, device="cpu", run_dir="run", allow_inexact=True, **planned)
            trainer.stack.add(two_epochs())
            trainer.fit(task, splits.train, splits.val)
        except forge.ForgeError as error:
            found.append(("error", error.finding or "refused", str(error)))
    logging.getLogger("forge").removeHandler(handler)
    found += [
        ("warning", finding, str(item.message)) for item in caught if (finding := getattr(item.message, "finding", ""))
    ]
    found += [
        ("warning", finding, record.getMessage()) for record in records if (finding := getattr(record, "finding", ""))
    ]
    return {"findings": found}
