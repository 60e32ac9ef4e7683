"""Repeat a run with other seeds, or on other folds of the data, as one group: each in a process of its own."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge import options
from forge.config.recipe import Recipe
from forge.config.schema import maker_of
from forge.errors import ForgeError, Interrupted, RecipeError
from forge.runs.card import new_run_dir
from forge.runs.folder import RunFolder
from forge.runs.group import FOLD, RunGroup, newest_group
from forge.runs.lock import RunLock
from forge.util.children import OUTPUT, Children, cause_of_death, in_jobs, signals_to
from forge.util.files import absolute, make_folder
from forge.util.text import short_path

Values = Mapping[str, int]
"""The options that tell a run of a group from the others: {"trainer.seed": 1}."""
FINISHED, STOPPED = "finished", "interrupted"


def as_overrides(values: Values) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def check_jobs(jobs: int) -> None:
    if jobs < 1:
        raise ForgeError(f"--jobs is {jobs}; it must be at least 1.")


def check_members(recipe: Recipe, runs: Mapping[str, Values]) -> None:
    """Raise if the recipe cannot take what tells the runs apart. It need not be checked itself yet."""
    for key in dict.fromkeys(key for values in runs.values() for key in values):
        section, _, option = key.partition(".")
        if option in recipe.config.get(section, {}) and recipe.origin.get(key) == "command line":
            raise RecipeError(f"{key} is given, and is what the runs of this group differ in: leave one of them out.")
    if not any(FOLD in values for values in runs.values()):
        return
    maker = maker_of("data", recipe.config, recipe.local, recipe.origin)
    known = {option.name for option in options.of_callable(maker)} if maker is not None else set()
    if not {"fold", "folds"} <= known:
        whose = "The recipe names no data function" if maker is None else f"The data function {maker.__qualname__!r}"
        lacks = "" if maker is None else f" takes {', '.join(sorted(known)) or 'nothing'}, not fold and folds"
        raise RecipeError(
            f"{whose}{lacks}. Write data(fold: int = 0, folds: int = 5), which validates on one part of the data and "
            "trains on the others: val = samples[fold::folds]."
        )


def choose_folder(name: str, job: Sequence[str], run_dir: str | Path | None, resume: str | Path | None) -> Path:
    """Return the folder of a group: the one named, the newest of the same job, or a new one."""
    if resume is not None and resume != "auto":
        run_dir = resume
    if run_dir is None:
        there = newest_group(absolute(Path("runs") / name), job) if resume else None
        return there or absolute(new_run_dir(name))
    home = absolute(run_dir)
    if resume is None and RunGroup(home).record:
        raise ForgeError(f"{short_path(home)} already holds a group: --resume (resume='auto') continues it.")
    return home


def unfinished(group: RunGroup) -> list[str]:
    """Return the runs that are to be made, or continued, in order."""
    return [name for name in group.members if RunFolder(group.path / name).status != FINISHED]


def train_apart(
    group: RunGroup,
    words: Callable[[Values], Sequence[str]],
    jobs: int = 1,
    tell: Callable[[str, str], None] = lambda name, how: None,
) -> dict[str, str]:
    """Train the runs that are not finished by `forge fit WORDS`, each in a process of its own; return why some failed.

    One job prints where this process prints; of several, each prints to output.txt in its run folder. `tell` is called
    with each run that begins, and ends: with "", "finished" or why it failed. A signal is passed on: the runs save.
    """
    waiting, failed, children, mutex = unfinished(group), {}, Children(), threading.Lock()
    problems: list[BaseException] = []

    def work(device: str | None) -> None:
        try:
            while not children.stopped:
                with mutex:
                    if not waiting:
                        return
                    name = waiting.pop(0)
                    tell(name, "")
                how = train(name, device)
                with mutex:
                    if how == STOPPED:
                        children.stop()
                    elif how != FINISHED:
                        failed[name] = how
                    tell(name, how)
        except BaseException as error:
            problems.append(error)
            children.stop()

    def train(name: str, device: str | None) -> str:
        folder = group.path / name
        again = ["--resume"] if RunFolder(folder).checkpoints else []
        command = ["-m", "forge", "fit", *words(group.members[name]), "--run-dir", str(folder), *again]
        make_folder(folder)
        with (folder / OUTPUT).open("ab") if jobs > 1 else open(os.devnull, "ab") as output:
            streams: dict[str, Any] = {"stdout": output, "stderr": output} if jobs > 1 else {}
            sys.stdout.flush()
            with children.start(command, device, **streams) as child:
                pass
        if child.returncode == Interrupted.EXIT_CODE or (child.returncode and children.stopped):
            return STOPPED
        return cause_of_death(child.returncode, folder / OUTPUT) if child.returncode else FINISHED

    with RunLock(group.path), signals_to(children.stop):
        in_jobs(work, jobs)
    if problems:
        raise problems[0]
    if children.stopped:
        done = len(group.members) - len(unfinished(group))
        raise Interrupted(
            f"The group was interrupted: {done} of {len(group.members)} runs are finished. --resume continues it."
        )
    return failed
