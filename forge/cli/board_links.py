"""A folder of links to runs, for TensorBoard.

TensorBoard names a run by its path below one folder. Given several (`--logdir_spec`) it leaves out the PROJECTOR
page; with links every page works, and runs have the names that people know them by.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path


class Links:
    """A link in `folder` for every run in the folders given, made and removed as runs come and go."""

    def __init__(self, folder: Path, given: Sequence[Path], base: Path):
        self._folder, self._given, self._base = folder, given, base
        self._shows_traces = find_spec("torch_tb_profiler") is not None
        self._made: set[str] = set()
        self.names: set[str] = set()
        "The runs that are shown."

    def renew(self) -> set[str]:
        """Look for runs again; return the names of those that there are."""
        wanted: dict[str, Path] = {}
        for run, log in (found for path in self._given for found in runs_below(path.resolve())):
            name = name_of(run, self._base)
            wanted[name] = log
            if self._shows_traces and (run / "profile").is_dir():
                wanted[f"{name} trace"] = run / "profile"
        for name in self._made - wanted.keys():
            self._remove(name)
        self._made = {name for name in sorted(wanted) if self._link(name, wanted[name])}
        self.names = {name for name in self._made if wanted[name].name != "profile"}
        return self.names

    def _link(self, name: str, log: Path) -> bool:
        """Whether a run has its link; one that cannot be made now is tried again at the next look."""
        link = self._folder / name
        if name in self._made and link.is_symlink():
            return True
        if any(parent.is_symlink() for parent in self._above(link)):  # a run inside of a run: never write there
            return False
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(log, target_is_directory=True)
        except OSError:
            return False
        return True

    def _remove(self, name: str) -> None:
        """Take a link away, and the folders above it that are empty now: their names may become those of runs."""
        link = self._folder / name
        with suppress(OSError):
            link.unlink(missing_ok=True)
            for parent in self._above(link):
                parent.rmdir()

    def _above(self, link: Path) -> list[Path]:
        return [parent for parent in link.parents if self._folder in parent.parents]


def runs_below(folder: Path) -> Iterator[tuple[Path, Path]]:
    """(run, the folder of its event files) for every run in a folder, or for the folder itself where it is one."""
    for parent, folders, _ in os.walk(folder):
        here = Path(parent)
        for log in (here / "tensorboard", here):
            if has_events(log):
                yield here if here.name != "tensorboard" else here.parent, log
                folders.clear()
                break
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def has_events(folder: Path) -> bool:
    """Whether TensorBoard would find something in this very folder."""
    return any("tfevents" in file.name for file in folder.glob("*"))


def base_of(given: Sequence[Path]) -> Path:
    """Where names begin: in the one folder of runs that was given, or in what several paths have in common."""
    paths = [path.resolve() for path in given]
    if len(paths) == 1 and not any(run == paths[0] for run, _ in runs_below(paths[0])):
        return paths[0]
    return Path(os.path.commonpath([path.parent for path in paths]))


def name_of(run: Path, base: Path) -> str:
    name = os.path.relpath(run, base)
    return run.name if name == "." or name.startswith("..") else name
