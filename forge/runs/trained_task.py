"""Source: a trained task and its data, found again from a run folder."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from forge import registry
from forge.checkpoint import StoredCheckpoint
from forge.checkpoint.checkpoint import NAME, averages
from forge.checkpoint.folder import Checkpoints
from forge.checkpoint.weights import BEST, RAW, best_of, fill, find_weights, read_weights, split_best
from forge.config.files import read
from forge.config.recipe import Recipe, read_recipe
from forge.contract.task import TaskModule
from forge.data import Splits
from forge.errors import CheckpointError, ForgeError
from forge.rng import RNGState, reseed
from forge.runs.choose import newest_first
from forge.runs.folder import RunFolder, as_dict
from forge.snapshot import frozen_modules
from forge.util.text import short_path

logger = logging.getLogger("forge")


@dataclass(frozen=True)
class Source:
    """A task with trained weights, in eval mode, and where the weights come from."""

    task: TaskModule
    run: str = ""
    "The name of the run folder; empty for a task that was given in Python."
    update: int | None = None
    weights: str = RAW
    "raw, or the plugin whose average they are; best says that the best checkpoint was taken."
    path: Path | None = None
    "The run folder."
    plugins: dict[str, Any] = field(default_factory=dict)
    "The state of the run's plugins at that checkpoint, where one was read."

    @property
    def words(self) -> str:
        """Describe the weights for people."""
        if not self.run:
            return f"{type(self.task).__name__} as given"
        at = "" if self.update is None else f" of update {self.update:,}"
        return f"{self.run}: {self.weights} weights{at}"


def load(
    run: str | Path, task: Callable[..., TaskModule] | None = None, *, weights: str | None = None, device: str = "cpu"
) -> TaskModule:
    """Return the trained task of a run, in eval mode, with its weights.

    `run` is a run folder, a checkpoint in it (`RUN:best`, `RUN/checkpoints/best`), a weights file, or a folder of runs,
    of which the newest is taken. `task` is the class, for a task that is neither installed nor imported under the name
    in the run, or a function that makes it, which gets the options of the run's recipe. Without `weights` the best
    checkpoint is taken if the run keeps one, and the average where a plugin kept one; "raw", "best" and the name of
    that plugin select.
    """
    return find(run, task, weights).task.to(device)


def find(run: str | Path, task: Callable[..., TaskModule] | None = None, weights: str | None = None) -> Source:
    """Find the task of a run and fill it with the weights that are asked for."""
    path, weights = split_best(run, weights)
    if not path.exists():
        raise ForgeError(f"There is no run at {run}. `forge runs` lists those below runs/.")
    if not (path / "card.json").exists() and (runs := newest_first(path)):
        logger.info("%s holds runs: the newest is taken, %s.", run, short_path(runs[0].path))
        path = runs[0].path
    folder = folder_of(path)
    kind = task or _class_of(folder, path)
    file, average, chosen = _choose(path, folder, weights)
    card = RunFolder(folder).card if folder is not None else {}
    with _seeded(card.get("seed")):  # as the run was before its task was made, which may draw a teacher
        made = _made(kind, folder, file, average).eval()
    state = _state(file)
    _restore_frozen(made, as_dict(card.get("frozen")), as_dict(state.get("frozen")), path)
    found = read_weights(file, average)
    named = chosen if found.average is None else f"{chosen}, {found.average}" if chosen == BEST else found.average
    return Source(made, (folder or path).resolve().name, found.update, named, folder, state.get("plugins", {}))


@contextmanager
def _seeded(seed: Any) -> Iterator[None]:
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    kept = RNGState.capture(device)
    try:
        if type(seed) is int and -(2**63) <= seed < 2**64:
            reseed(seed)
        yield
    finally:
        kept.restore(device)


def _made(maker: Callable[..., TaskModule], folder: Path | None, file: Path, average: str | None) -> TaskModule:
    """Make the task again, with its weights: a class has its arguments from the weights file, a function from the
    run's recipe."""
    if isinstance(maker, type):
        return maker.from_checkpoint(file, weights=average)
    recipe = _recipe(folder, maker) if folder is not None else None
    with torch.device("cpu"):
        task = recipe.make_task() if recipe is not None else maker()
    fill(task, read_weights(file, average))
    return task


def _restore_frozen(task: TaskModule, noted: dict[str, Any], saved: dict[str, Any], path: Path) -> None:
    """Refuse frozen modules that are not those that the run began with; put back what changed in them."""
    began = noted or saved  # neither: the run knew of none
    if began and (odd := frozen_modules.differences(task, began)):
        raise CheckpointError(
            f"{path} cannot be loaded: {odd}. A frozen module is in no weights file; the task builds it again. Give it "
            f"the same weights, or take it as it is: {type(task).__name__}.from_checkpoint(...)."
        )
    frozen_modules.put_back(task, saved)


def folder_of(path: Path) -> Path | None:
    """Return the run folder that a path is, or is in; None for a file that stands alone."""
    for folder in (path, *path.absolute().parents[:2]):
        if (folder / "card.json").is_file() or (folder / "checkpoints").is_dir():
            return folder
    return path if path.is_dir() and not NAME.fullmatch(path.resolve().name) else None


def data_of(folder: Path) -> Splits:
    """Build the data of a run that its recipe names, if they are installed."""
    recipe = _recipe(folder)
    if recipe is None or "name" not in recipe.config.get("data", {}):
        raise ForgeError(
            f"{folder} does not name its data, or they are not installed by name: add --data FILE.py:function "
            "(data=... in Python), a function that returns forge.data.Splits."
        )
    return recipe.make_data()


def _class_of(folder: Path | None, path: Path) -> type[TaskModule]:
    """Return the class of a run's task: the one that its recipe names, else an installed or imported one of its name.

    Nothing is imported because a run folder says so: a folder may come from a stranger.
    """
    recipe = _recipe(folder) if folder is not None else None
    name = (recipe.config.get("task") or {}).get("name") if recipe is not None else None
    if name is not None:
        return registry.load("task", name)
    saved = _saved_class(path)
    found = _imported(saved) or _installed(saved)
    if len(found) == 1:
        return found[0]
    several = " and ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in found)
    why = f"is {several}" if several else "is neither installed by name nor imported here"
    raise ForgeError(
        f"The task {saved or '(unnamed)'} of {path} {why}: pass the class, forge.load(RUN, task={saved or 'Task'}), "
        "or add --task FILE.py:Task on the command line."
    )


def _installed(name: str) -> list[type[TaskModule]]:
    """Return the installed tasks whose class is called so."""
    return [registry.load("task", key) for key, entry in registry.installed("task").items() if entry.attr == name]


def _imported(name: str) -> list[type[TaskModule]]:
    """Return the classes of that name that modules of this process hold; in a notebook, the latest of each."""
    kinds: list[type[TaskModule]] = [TaskModule]
    for kind in kinds:  # grows while it is walked
        kinds.extend(below for below in kind.__subclasses__() if below not in kinds)
    return [
        kind for kind in kinds if kind.__name__ == name and getattr(sys.modules.get(kind.__module__), name, 0) is kind
    ]


def _recipe(folder: Path, task: Callable[..., TaskModule] | None = None) -> Recipe | None:
    """Load a run's recipe without its plugins, which need not be installed here."""
    file = folder / "config.yaml"
    if not file.is_file():
        return None
    try:
        plugins = list(read(file).values.get("plugins") or {})
        return read_recipe(file, remove=plugins, task=task).checked()
    except ForgeError as error:
        raise ForgeError(f"{file}: {error}") from error


def _saved_class(path: Path) -> str:
    try:
        task = read_weights(path).task
    except ForgeError:
        return ""
    return str(task["class"]) if task else ""


def _choose(path: Path, folder: Path | None, weights: str | None) -> tuple[Path, str | None, str]:
    """Return the file or checkpoint to read, the average to take of it, and the word for the choice."""
    is_run = folder is not None and path.resolve() == folder.resolve()
    best = best_of(folder) if is_run and folder is not None and weights in (None, BEST) else None
    if weights == BEST and best is None and is_run:
        raise ForgeError(f"{path} has no best checkpoint.{registry.advice('best', ' Train with {}.')}")
    if best is not None:
        return best, _average(best), BEST
    if weights in (None, BEST):
        found = find_weights(path)
        return found, _average(found) if found.is_dir() else None, RAW
    return path, weights, weights


def _average(checkpoint: Path) -> str | None:
    """Return the plugin whose average a checkpoint holds: what was evaluated there."""
    held = averages(StoredCheckpoint(checkpoint).outline())
    return next(iter(held), None)


def _state(path: Path) -> dict[str, Any]:
    """Return what a checkpoint, or the newest of a run, has beside the weights."""
    where = path if path.is_dir() else path.parent
    stored = where if NAME.fullmatch(where.name) else None
    if stored is None and (where / "checkpoints").is_dir():
        newest = Checkpoints(where / "checkpoints").newest_valid()
        stored = newest.path if newest is not None else None
    return StoredCheckpoint(stored).load(only="state") if stored is not None else {}
