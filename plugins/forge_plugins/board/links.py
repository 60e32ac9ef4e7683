"""A folder of links to runs, for TensorBoard.

TensorBoard names a run by its path below one folder. With several folders (`--logdir_spec`) it drops the PROJECTOR
page; with links every page works, and runs keep their own names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from forge.runs.group import RunGroup
from forge.util.files import is_regular
from forge_plugins.board.means import groups_of, write_mean


class Links:
    """Links in `folder` to every run of the given folders, updated as runs appear and disappear, and the means of
    groups that are finished."""

    def __init__(self, folder: Path, given: Sequence[Path], base: Path):
        self._folder, self._given, self._base = folder, given, base
        self._shows_traces = find_spec("torch_tb_profiler") is not None
        self._made: set[str] = set()
        self._means: dict[str, bool] = {}
        "The groups whose mean was written, by name."
        self.names: set[str] = set()
        "The runs that are shown."

    def renew(self) -> set[str]:
        """Search for runs again and return their names."""
        wanted: dict[str, Path] = {}
        found = [each for path in self._given for each in runs_below(path.resolve())]
        for run, log in found:
            name = name_of(run, self._base)
            wanted[name] = log
            if self._shows_traces and (run / "profile").is_dir():
                wanted[f"{name} trace"] = run / "profile"
        for name in self._made - wanted.keys():
            self._remove(name)
        self._made = {name for name in sorted(wanted) if self._link(name, wanted[name])}
        self.names = {name for name in self._made if wanted[name].name != "profile"}
        for group in groups_of(run for run, _ in found):
            name = f"{name_of(group.path, self._base)} mean of {len(group.runs)}"
            self._means[name] = self._means.get(name) or self._write_mean(group, name)
        return self.names

    def _write_mean(self, group: RunGroup, name: str) -> bool:
        with suppress(OSError):
            write_mean(group, self._folder / name)
            return True
        return False

    def _link(self, name: str, log: Path) -> bool:
        """Make the link of a run; return False if it cannot be made now, so that the next search tries again."""
        link = self._folder / name
        if name in self._made and link.is_symlink():
            return True
        if any(parent.is_symlink() for parent in self._parents(link)):  # a run inside a run: never write there
            return False
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(log, target_is_directory=True)
        except OSError:
            return False
        return True

    def _remove(self, name: str) -> None:
        """Remove a link and the folders above it that are empty now: a new run may take their names."""
        link = self._folder / name
        with suppress(OSError):
            link.unlink(missing_ok=True)
            for parent in self._parents(link):
                parent.rmdir()

    def _parents(self, link: Path) -> list[Path]:
        return [parent for parent in link.parents if self._folder in parent.parents]


def runs_below(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield (run, folder of its event files) for every run in a folder, which may be a run itself."""
    for parent, folders, _ in os.walk(folder):
        here = Path(parent)
        for log in (here / "tensorboard", here):
            if _has_events(log):
                yield here if here.name != "tensorboard" else here.parent, log
                folders.clear()
                break
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def _has_events(folder: Path) -> bool:
    """Whether a folder has event files, all of them regular: TensorBoard would follow a link and wait for a pipe."""
    events = [] if folder.is_symlink() else [file for file in folder.glob("*") if "tfevents" in file.name]
    return bool(events) and all(map(is_regular, events))


def base_of(given: Sequence[Path]) -> Path:
    """Return the folder that names are relative to: the only folder given, or the common parent of several."""
    paths = [path.resolve() for path in given]
    if len(paths) == 1 and not any(run == paths[0] for run, _ in runs_below(paths[0])):
        return paths[0]
    return Path(os.path.commonpath([path.parent for path in paths]))


def name_of(run: Path, base: Path) -> str:
    name = os.path.relpath(run, base)
    return run.name if name == "." or name.startswith("..") else name
