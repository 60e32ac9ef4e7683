"""Write a window with everything needed to run it again, in the format of a checkpoint."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import logging
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import forge
from forge.checkpoint import write_checkpoint
from forge.errors import CheckpointError
from forge.snapshot.capture import describe_plugin, describe_task
from forge.util.text import short_path
from forge_plugins.anomaly.analysis import Before, sample_edges

logger = logging.getLogger("forge.anomaly")


def write(step: forge.Step, before: Before, finding: dict[str, Any]) -> Path | None:
    """Write RUN/anomaly/update-XXXXXXXX and return it; None without a run folder, and on other ranks than 0."""
    trainer = step.trainer
    if trainer.run_dir is None or not trainer.env.is_main:
        return None
    target = trainer.run_dir / "anomaly" / f"update-{step.index:08d}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(target, tree_of(step, before, finding))
    except (OSError, CheckpointError) as error:  # the finding matters more than its bundle
        logger.warning("No replay bundle could be written to %s: %s", target, error)
        return None
    return target


def command(path: Path, trainer: forge.Run) -> str:
    """Return the command that runs a bundle again; a task without a registered name is given by its file."""
    words = ["forge", "replay", short_path(path)]
    recipe = trainer.recipe
    if recipe is None or "name" not in recipe.config.get("task", {}):
        kind = type(trainer.task)
        try:
            file = short_path(inspect.getfile(kind))
        except (OSError, TypeError):  # defined in a notebook
            file = "FILE.py"
        words += ["--task", f"{file}:{kind.__name__}"]
    return shlex.join(words)


def tree_of(step: forge.Step, before: Before, finding: dict[str, Any]) -> dict[str, Any]:
    """Return the state before the window, and the finding."""
    trainer, task = step.trainer, step.trainer.task
    assert before.rng is not None
    weights = task.state_dict()
    paths = {id(module._buffers): f"{path}." if path else "" for path, module in task.named_modules()}
    pairs = zip(before.buffers, before.copies, strict=True)
    buffers = {paths[id(owner)] + name: value for (owner, name), value in pairs}
    window = list(step.window) if is_plain(list(step.window)) else None
    if window is None:
        logger.warning(
            "The batches of this window are not plain tensors, numbers and strings, so the bundle lacks them."
        )
    recipe = trainer.recipe
    return {
        "model": {name: buffers.get(name, value) for name, value in weights.items()},
        "buffers": {name: value for name, value in buffers.items() if name not in weights},
        "rng": before.rng.as_tree(),
        "window": window,
        "indices": _indices(step),
        "turn": step.name,
        "progress": dataclasses.asdict(trainer.progress),
        "task": describe_task(task),
        "recipe": None if recipe is None else recipe.config,
        "stack": [describe_plugin(plugin) for plugin in trainer.stack],
        "trainer": trainer.settings,
        "versions": {"forge": forge.__version__, "torch": str(torch.__version__)},
        "finding": finding,
    }


def is_plain(value: Any) -> bool:
    """Whether a batch can be written and read back: only tensors, numbers, strings and their containers."""
    if type(value) in (list, tuple):
        return all(is_plain(item) for item in value)
    if type(value) is dict:
        return all(type(key) in (str, int) and is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str, Tensor)


def _indices(step: forge.Step) -> list[list[int]] | None:
    """Return the dataset indices of every micro-batch, if the loader knows them."""
    edges = sample_edges(step)
    if edges is None:
        return None
    ask = step.trainer.feed.loader.sample_indices
    return [[int(index) for index in ask(step.epoch, *ends)] for ends in itertools.pairwise(edges)]
