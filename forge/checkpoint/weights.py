"""Load a task's parameters and buffers from files, checkpoints and run folders; save them as one safetensors file."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parameter import is_lazy

from forge import registry
from forge.checkpoint import captured, sharding, temp_names
from forge.checkpoint.checkpoint import NAME, StoredCheckpoint
from forge.checkpoint.folder import Checkpoints
from forge.checkpoint.foreign import SUFFIXES, Rename, read_foreign, renamed, unwrapped
from forge.checkpoint.publish import cause_of
from forge.errors import CheckpointError, TaskError
from forge.util.files import sync_directory
from forge.util.text import few

logger = logging.getLogger("forge")

EXTRA_STATE = "_extra_state"
"""torch's name for module state that is not a tensor; a weights file cannot hold it."""
NOTE = "forge"
"""The key of forge's note in the metadata of a weights file."""
RAW = "raw"
"""Selects the trained weights; the name of a plugin selects its average."""
BEST = "best"
"""Selects the checkpoint of a run that is linked as the best; also RUN:best, as a path."""
SHOWN = 20
"""Names that a report prints of each kind."""

_averaged_by: ContextVar[str | None] = ContextVar("averaged_by", default=None)


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors by name, and the task they came from, if the file notes it."""

    path: Path | str
    "The resolved file or checkpoint directory; a URL as it was given."
    tensors: dict[str, Any]
    task: dict[str, Any] | None
    '`{"class": name, "options": {...}, "not_saved": [...]}`, or None for a file that forge did not write.'
    update: int | None = None
    "The update they were saved at, if noted."
    average: str | None = None
    "The plugin whose average they are; None for trained weights."


class Misfit(TaskError):
    """Weights that do not fit a task; `saved` is the task they came from, if noted."""

    def __init__(self, message: str, saved: dict[str, Any] | None = None):
        super().__init__(message)
        self.saved = saved


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load, tensor by tensor; `print(report)` is readable."""

    source: Path | str
    task: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    "In the task, but not in the file: their values are unchanged."
    unexpected: tuple[str, ...]
    "In the file, but not in the task."
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    "Of another shape: (in the file, in the task). Their values are unchanged."
    taken_off: tuple[str, ...] = ()
    "Wrapper prefixes that were removed from the file's names."

    @property
    def complete(self) -> bool:
        """Whether file and task match completely."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        off = f" (names read without {', '.join(self.taken_off)})" if self.taken_off else ""
        lines = [f"{self.source} into {self.task}: {len(self.loaded)} tensors loaded{off}."]
        for title, names in (
            ("missing in the file", self.missing),
            ("not in the task", self.unexpected),
            ("of another shape", [_shapes(name, *both) for name, both in self.mismatched.items()]),
        ):
            if names:
                lines += [f"  {title} ({len(names)}):", *(f"    {name}" for name in names[:SHOWN])]
                lines += [f"    and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
        return "\n".join(lines)


# -- loading ----------------------------------------------------------------------------------------------------------


def load_weights(
    task: nn.Module,
    path: str | Path,
    *,
    weights: str | None = None,
    strict: bool = True,
    rename: Rename | None = None,
) -> LoadReport:
    """Load weights into a task, or into any module of it, from

    - a `.safetensors` file;
    - a checkpoint directory, or a run folder: its `weights.safetensors`, unless a checkpoint is newer;
    - a `.pt`, `.pth`, `.ckpt` or `.bin` of torch.save or Lightning, if it can be read without running code;
    - the URL of any of these (`s3://bucket/runs/first`, `gs://…`, any that fsspec knows), downloaded and verified.

    `weights` may be the name of a plugin, for the average that it kept, "raw", for the trained weights, or "best", for
    those of a run's best checkpoint, as with the path `RUN:best`. By default a weights file gives its content (the
    average, if the fit evaluated one) and a checkpoint the trained weights.

    Names and shapes must match, else nothing is changed and TaskError names the differences. `strict=False` loads the
    matching tensors and logs those that are missing, unexpected or of another shape; the returned report lists all.

    `rename` maps the file's names to the task's: a prefix to its replacement (`{"backbone.": "net."}`, `{"": "net."}`
    to prefix every name), or, beginning with `^`, a regular expression to its replacement
    (`{r"^layer(\\d+)\\.": r"layers.\\1."}`). Rules apply in order, each to the result of the previous one. Without
    `rename`, the prefixes of torch.compile, DDP and Lightning are removed if more names match then, and logged.
    """
    return fill(task, read_weights(path, weights), strict=strict, rename=rename)


def fill(task: nn.Module, weights: Weights, *, strict: bool = True, rename: Rename | None = None) -> LoadReport:
    """Load weights that are already read: see `load_weights`."""
    state = task.state_dict()
    taken_off: tuple[str, ...] = ()
    if rename is None:
        names, taken_off = unwrapped(weights.tensors, state)
    else:
        names = renamed(weights.tensors, rename, str(weights.path))
    tensors = {names[name]: tensor for name, tensor in weights.tensors.items()}
    odd = _other_shapes(tensors, state)
    before = _copied(state) if strict else {}
    try:
        missing, unexpected, odd = _load(task, tensors, odd)
    except RuntimeError as error:
        if strict:
            _restore(task, before)
        raise Misfit(f"{weights.path} does not fit {type(task).__name__}: {error}", weights.task) from error
    report = LoadReport(
        source=weights.path,
        task=type(task).__name__,
        loaded=tuple(name for name in tensors if name not in odd and name not in unexpected),
        missing=tuple(_really_missing(task, missing, tensors)),
        unexpected=tuple(unexpected),
        mismatched=odd,
        taken_off=taken_off,
    )
    if strict and not report.complete:
        _restore(task, before)
        raise Misfit(_misfit(report), weights.task)
    if not report.complete:
        logger.warning("%s", report)
    elif taken_off:
        logger.info("%s", report)
    return report


def as_saved_by(task: nn.Module, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return tensors with the versions of the task's modules, which `state_dict` carries and no file holds.

    A module whose layout has changed in the past asks for its version, as torchvision's MNASNet does.
    """
    state = OrderedDict(tensors)
    state._metadata = getattr(task.state_dict(), "_metadata", None)  # pyright: ignore[reportAttributeAccessIssue]
    return state


def _load(
    task: nn.Module, tensors: Mapping[str, Any], odd: dict[str, Any]
) -> tuple[list[str], list[str], dict[str, Any]]:
    """Load the matching tensors; return (missing, unexpected, of another shape)."""
    try:
        missing, unexpected = task.load_state_dict(as_saved_by(task, tensors), strict=False)
        return missing, unexpected, {}  # a module may accept another shape
    except RuntimeError:
        if not odd:
            raise
    fitting = {name: tensor for name, tensor in tensors.items() if name not in odd}
    missing, unexpected = task.load_state_dict(as_saved_by(task, fitting), strict=False)
    return [name for name in missing if name not in odd], unexpected, odd


def _restore(task: nn.Module, before: Mapping[str, Any]) -> None:
    with suppress(RuntimeError):  # a module that always refuses has already raised
        task.load_state_dict(as_saved_by(task, before), strict=False)


def _misfit(report: LoadReport) -> str:
    parts = [f"it lacks {few(report.missing, 5)}"] if report.missing else []
    parts += [f"it has {few(report.unexpected, 5)}, which the task lacks"] if report.unexpected else []
    parts += [few((_shapes(name, *both) for name, both in report.mismatched.items()), 5)] if report.mismatched else []
    return (
        f"{report.source} does not fit {report.task}: {'; '.join(parts)}. "
        "forge.load_weights(task, path, strict=False) loads what matches; rename= maps names."
    )


def _other_shapes(tensors: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: (value, state[name]) for name, value in tensors.items() if name in state}
    return {
        name: (tuple(ours.shape), tuple(theirs.shape))
        for name, (ours, theirs) in both.items()
        if isinstance(ours, Tensor)
        and isinstance(theirs, Tensor)
        and not is_lazy(theirs)
        and ours.shape != theirs.shape
    }


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a state, to restore it if a load fails halfway."""
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in state.items()
        if not is_lazy(value)
    }


def _really_missing(task: nn.Module, missing: Iterable[str], loaded: Mapping[str, Any]) -> list[str]:
    """Return the names that stayed unfilled: neither extra state nor tied to a loaded weight."""
    state = task.state_dict()
    filled = {state[name].data_ptr() for name in loaded if isinstance(state.get(name), Tensor)}
    return [
        name
        for name in missing
        if not name.endswith(EXTRA_STATE) and not (isinstance(state[name], Tensor) and state[name].data_ptr() in filled)
    ]


# -- reading ----------------------------------------------------------------------------------------------------------


def read_weights(path: str | Path, weights: str | None = None) -> Weights:
    """Read the tensors of a path, on the CPU; a checkpoint is verified first.

    `weights` names the plugin whose average is wanted, or is "raw". Averages are found by convention: a plugin offers
    one if its `forge_state_dict` has a dict "weights" of tensors by the task's names. The trained weights fill in the
    names that it lacks. "best", or RUN:best as the path, is the best checkpoint of a run.
    """
    if isinstance(path, str) and "://" in path:
        url = str(path)
        if weights == BEST or url.endswith(f":{BEST}"):
            raise TaskError(
                f"{url}: which checkpoint is the best is noted on disk only. Give its URL, …/update-00001000."
            )
        with registry.load("storage", "weights").downloaded(url, weights is not None, _update_of) as local:
            return dataclasses.replace(read_weights(local, weights), path=url.rstrip("/"))
    path, weights = split_best(path, weights)
    if weights == BEST:
        path, weights = find_best(Path(path)), None
    found = find_weights(Path(path))
    if weights is not None and found.is_file():
        found = _holder(found, Path(path), weights)
    if found.is_dir():
        average = None if weights == RAW else weights
        tree = StoredCheckpoint(found).load_weights(average)
        captured.check(tree, str(found), ("model", "task", "progress"))
        return Weights(found, tree["model"], tree["task"], tree["progress"].get("update", 0), average)
    if found.suffix in SUFFIXES:
        return Weights(found, read_foreign(found), None)
    return _read_safetensors(found)


def split_best(path: str | Path, weights: str | None = None) -> tuple[Path, str | None]:
    """Return RUN and "best" for RUN:best; other arguments unchanged, and a path that exists."""
    run, colon, name = str(path).rpartition(":")
    if colon and run and name == BEST and weights in (None, BEST) and not Path(path).exists():
        return Path(run), BEST
    return Path(path), weights


def best_of(run: Path) -> Path | None:
    """Return a run's best checkpoint; a link elsewhere than into its folder is not followed."""
    there = (run / "checkpoints" / BEST).resolve()
    is_inside = there.parent == (run / "checkpoints").resolve() and bool(NAME.fullmatch(there.name))
    return there if is_inside and there.is_dir() else None


def find_best(run: Path) -> Path:
    """Return a run's best checkpoint; raise if it keeps none."""
    found = best_of(run)
    if found is None:
        what = "has no best checkpoint" if run.is_dir() else "is no run folder"
        raise TaskError(f"{run} {what}.{registry.advice('best', ' Train with {}.')}")
    return found


def _holder(file: Path, path: Path, weights: str) -> Path:
    """Return the weights file if it holds the wanted weights, else the newest checkpoint of its run."""
    held = (None if file.suffix in SUFFIXES else _note(_opened(file)).average) or RAW
    if held == weights:
        return file
    newest = _checkpoints(path).newest_valid() if path.is_dir() else None
    if newest is None:
        holds = "the trained weights" if held == RAW else f"the average of the plugin {held!r}"
        wanted = "the trained weights" if weights == RAW else f"the average {weights!r}"
        raise TaskError(f"{file} holds {holds}. For {wanted}, give a checkpoint or a run folder with one.")
    return newest.path


def find_weights(path: Path) -> Path:
    """Resolve a path to a weights file or checkpoint directory.

    For a run folder that is `weights.safetensors`, which a fit writes at its end, or a valid checkpoint of a later
    update if the run was resumed since or has not ended.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise TaskError(f"There is no weights file at {path}. fit writes RUN/weights.safetensors at its end.")
    real = path.resolve()  # the given path may be a link; links inside are not followed
    if NAME.fullmatch(real.name) or (real / "manifest.json").exists():
        return real
    file = path / "weights.safetensors"
    folder = _checkpoints(path)
    written = _update_of(file) if file.is_file() else -1
    if any(StoredCheckpoint(found).update > written for found in folder.all()):
        newest = folder.newest_valid()
        if newest is not None and newest.update > written:
            return newest.path
    if not file.is_file():
        raise TaskError(
            f"There is no weights file at {file}, and no valid checkpoint beside it. fit writes "
            "RUN/weights.safetensors at its end; a plugin that saves checkpoints does so during training."
        )
    return file


def _checkpoints(path: Path) -> Checkpoints:
    return Checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path)


def _update_of(file: Path) -> float:
    """Return the update of a weights file; infinity if it is not noted."""
    update = _note(_opened(file)).update
    return float("inf") if update is None else update


def _read_safetensors(file: Path) -> Weights:
    opened = _opened(file)
    note = _note(opened)
    try:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged: {error}.") from error
    return Weights(file, tensors, note.task, note.update, note.average)


@dataclass(frozen=True, slots=True)
class Note:
    """The note of forge in a weights file; empty in other files."""

    task: dict[str, Any] | None = None
    update: int | None = None
    average: str | None = None


def _note(opened: Any) -> Note:
    try:
        note = json.loads((opened.metadata() or {})[NOTE])
        task, update, average = note["task"], note["update"], note.get("average")
        task = task and {
            "class": str(task["class"]),
            "options": dict(task["options"]),
            "not_saved": list(task["not_saved"]),
        }
        return Note(task, update and int(update), average and str(average))
    except (KeyError, TypeError, ValueError, RecursionError):
        return Note()


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a safetensors file, or it is damaged: {error}. "
            f"Files of torch.save are recognised by their suffix: {', '.join(SUFFIXES)}."
        ) from error


# -- writing ----------------------------------------------------------------------------------------------------------


def save_weights(task: nn.Module, path: Path, main: bool | None = None) -> None:
    """Write parameters and buffers, and the task's arguments, to a safetensors file.

    Called on all ranks: sharded tensors are gathered one at a time, and the `main` rank writes (by default rank 0 of
    torch.distributed).
    """
    if main is None:
        main = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
    tensors = _gathered(task.state_dict(), main)
    if not main:
        return
    description = describe_task(task) if hasattr(task, "init_args") else None  # pyright: ignore[reportArgumentType]
    trainer = getattr(task, "trainer", None)
    update = trainer.progress.update if trainer is not None else None
    write_weights(Weights(path, tensors, description, update, _averaged_by.get()), path)


def _gathered(state: Mapping[str, Any], main: bool) -> dict[str, Any]:
    """Return the state with DTensors gathered in host memory of `main`; tied ones are gathered once."""
    found: dict[str, Any] = {}
    seen: dict[tuple[Any, ...], Tensor | None] = {}
    for name, value in state.items():
        if not sharding.is_distributed(value):
            found[name] = value
            continue
        place = sharding.place_of(value)
        if place not in seen:
            whole = sharding.whole(value)  # a collective: called on every rank
            seen[place] = whole.cpu() if main else None
        found[name] = seen[place]
    return found


@contextmanager
def noted_as_average(plugin: str) -> Iterator[None]:
    """Note in files that `save_weights` writes meanwhile that they hold the average of this plugin."""
    token = _averaged_by.set(plugin)
    try:
        yield
    finally:
        _averaged_by.reset(token)


def write_weights(weights: Weights, path: Path) -> int:
    """Write a temporary file, then rename it, so that `path` is never torn; return the number of tensors.

    Equal weights give equal files. Unfinished files of dead processes for this name are removed.
    """
    try:
        return _write_weights(weights, path)
    except (OSError, SafetensorError) as error:
        why = cause_of(path, error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            f"{path} could not be written: {why}. Checkpoints are untouched: `forge ckpt export RUN FILE` writes the "
            "weights of one."
        ) from error


def _write_weights(weights: Weights, path: Path) -> int:
    note = {"task": weights.task, "update": weights.update}
    if weights.average is not None:
        note["average"] = weights.average
    tensors = _tensors(weights.tensors, path.name)
    metadata = {"format": "pt", NOTE: json.dumps(note)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in temp_names.abandoned(path.parent):
        if left.name == path.name:
            temp_names.remove(left.path)
    with temp_names.temporary(path) as (partial, _):
        try:
            save_file(tensors, partial, metadata=metadata)
            _sort_metadata_and_sync(partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    sync_directory(path.parent)
    return len(tensors)


def _tensors(state: Mapping[str, Any], file: str) -> dict[str, Tensor]:
    """Return every tensor of the state once, each with its own memory."""
    kept: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            module = name.removesuffix(f".{EXTRA_STATE}")
            warnings.warn(f"{file} omits the extra state of {module}: it is not a tensor.", stacklevel=2)
            continue
        place = (value.data_ptr(), tuple(value.shape), tuple(value.stride()))
        if value.numel() and place in seen:  # tied: loading the first fills them all
            continue
        seen.add(place)
        whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
        kept[name] = value if whole else value.clone().contiguous()
    return kept


def _sort_metadata_and_sync(file: Path) -> None:
    """Sort the metadata, whose order safetensors varies from process to process, and sync the file."""
    with file.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(text) == size:
            stream.seek(8)
            stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _shapes(name: str, file: tuple[int, ...], task: tuple[int, ...]) -> str:
    return f"{name} is {file} in the file and {task} in the task"


LONG = 10_000
"""An argument with more entries, such as a vocabulary, is not saved with the task."""


def describe_task(task: nn.Module) -> dict[str, Any]:
    """Return the task's class and its constructor arguments, as far as they are plain data."""
    arguments: dict[str, Any] = getattr(task, "init_args", {})
    plain = {name: value for name, value in arguments.items() if is_plain(value)}
    return {
        "class": type(task).__name__,
        "options": plain,
        "not_saved": [name for name in arguments if name not in plain],
    }


def is_plain(value: Any) -> bool:
    """Whether a checkpoint can store a value and return it unchanged."""
    if type(value) in (list, tuple):
        return len(value) < LONG and all(is_plain(item) for item in value)
    if type(value) is dict:
        return len(value) < LONG and all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)
