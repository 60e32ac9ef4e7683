"""Answers of earlier searches: what they depend on, and those in the checkpoints of a run."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from forge.checkpoint import StoredCheckpoint
from forge.contract.run import Run
from forge.contract.task import TaskModule
from forge.errors import CheckpointError
from forge.options import plain
from forge.runs.card import device_name, group_of
from forge.runs.choose import checkpoints_of, newest_first
from forge.runs.job import another_job, describe, job_of, name_of
from forge.util.files import absolute
from forge.version import __version__

FILE = "speed.json"

Answer = dict[str, dict[str, Any]]
"""Options of the plugins to add, by name."""


def as_answer(value: Any) -> Answer | None:
    """Return a value as an answer; None if it cannot be one."""
    if not isinstance(value, Mapping) or not all(isinstance(options, Mapping) for options in value.values()):
        return None
    return {str(name): dict(options) for name, options in value.items()}


def answer_key(trainer: Run, asked: Mapping[str, Any], device: torch.device, world: int, inputs: str) -> str:
    """Return a hash over everything that an answer depends on."""
    task = trainer.task
    parts = {
        "task": [type(task).__module__, type(task).__qualname__, _source(task), plain(task.init_args)],
        "weights": [(name, list(p.shape), str(p.dtype)) for name, p in task.named_parameters() if not is_lazy(p)],
        "stack": [describe(plugin) for plugin in trainer.stack if not plugin.observer],
        "inputs": inputs,
        "asked": dict(asked),
        "device": device_name(device),
        "world": world,
        "threads": torch.get_num_threads(),
        "deterministic": trainer.deterministic,
        "versions": [__version__, torch.__version__],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def _source(task: TaskModule) -> str:
    """Return a hash of the files that define the task's classes, the libraries' aside."""
    digest = hashlib.sha256()
    for kind in type(task).__mro__[:-1]:
        if kind.__module__.partition(".")[0] in ("torch", "forge"):
            continue
        with suppress(OSError, TypeError):
            digest.update(Path(inspect.getfile(kind)).read_bytes())
    return digest.hexdigest()


def resumed_answer(trainer: Run, plugin: str) -> Answer | None:
    """Return the answer that the run to be resumed was trained with; None if there is none."""
    for checkpoint in _checkpoints(trainer):
        try:
            state = StoredCheckpoint.find(checkpoint).outline()["plugins"].get(plugin)
        except (CheckpointError, OSError, KeyError):
            continue
        answer = as_answer(state.get("answer")) if isinstance(state, Mapping) else None
        if answer is not None:
            return answer
    return None


def _checkpoints(trainer: Run) -> Iterator[Path]:
    """Yield the checkpoints that a resume may use, the likeliest first."""
    wanted: Any = trainer.wanted_run_dir
    if trainer.resume is None:
        return
    if trainer.resume != "auto":
        path = absolute(trainer.resume)
        yield from reversed(checkpoints_of(path).all()) if (path / "checkpoints").is_dir() else [path]
    elif wanted:
        yield from reversed(checkpoints_of(absolute(wanted)).all())
    else:
        now = job_of(trainer)
        for run in newest_first(absolute(Path("runs") / group_of(trainer.recipe, name_of(trainer.task)))):
            if run.card and not another_job(run.card, now):
                yield from reversed(checkpoints_of(run.path).all())
