"""Checkpoint: one directory, checked against its manifest before anything in it is parsed.

    manifest.json        size and sha256 of every other file, and of itself
    state.json           the tree, with markers in place of tensors          (forge.state.tree)
    model.safetensors    the task's weights under their own names            (forge.state.tensors)
    state.safetensors    all other tensors

Files are opened by their fixed names, relative to the directory, never through a link, and only if they are regular
files of the size that the manifest gives. What an attacker puts there can give a CheckpointError or plain data; it
cannot run code.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from forge.errors import CheckpointError, did_you_mean
from forge.state import manifest, tensors, tree

NAME = re.compile(r"update-([0-9]{8}|[1-9][0-9]{8,15})")
"""The name of a checkpoint in a run: the number of updates that it comes after."""

_CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a checkpoint, without its numbers."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    place: str
    "Where it is stored: tied tensors share one place."


class Checkpoint:
    """A checkpoint directory. Making one reads nothing."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r})"

    @property
    def update(self) -> int:
        """The number in its name: how many updates had been made."""
        match = NAME.fullmatch(self.path.name)
        if match is None:
            raise CheckpointError(f"{self.path} is not named update-XXXXXXXX, so its name does not tell the update.")
        return int(match[1])

    @classmethod
    def find(cls, path: str | Path) -> Checkpoint:
        """The checkpoint that a path stands for: a checkpoint, a link to one, or the newest valid one of a run."""
        from forge.state.folder import find

        return find(Path(path))

    def verify(self) -> None:
        """Read every byte; raise a CheckpointError unless `load` would give back what was saved."""
        with self._verified() as files:
            files.tree(lambda file, name, note: None)

    def load(self, only: str | None = None) -> dict[str, Any]:
        """Verify, then return the tree as it was saved, with tensors on the CPU; tied tensors are tied again.

        `only="model"` loads the model's tensors and leaves None in place of all others, `only="state"` the reverse.
        """
        with self._verified() as files:
            return files.tree(_Tensors(files, only))

    def outline(self) -> dict[str, Any]:
        """Verify, then return the tree with a TensorInfo in place of every tensor."""
        with self._verified() as files:
            return files.tree(files.describe)

    def weights(self) -> dict[str, Tensor]:
        """Verify, then return the model's tensors by name, tied ones under each of their names."""
        model = self.load(only="model").get("model")
        if not isinstance(model, dict):
            raise CheckpointError(f"{self.path} holds no model.")
        return {name: value for name, value in model.items() if isinstance(value, Tensor)}

    def load_weights(self, average: str | None = None) -> dict[str, Any]:
        """`load(only="model")`; `average` names a plugin whose average stands in the place of the trained weights."""
        if average is None:
            return self.load(only="model")
        with self._verified() as files:
            outline = files.tree(files.describe)
            kept = averages(outline)
            if average not in kept:
                raise CheckpointError(self._no_average(average, outline, kept))
            tree = files.tree(_Tensors(files, "model"))
            read = {name: files.tensor(info) for name, info in kept[average].items()}
        return {**tree, "model": _replaced(tree["model"], read)}

    def _no_average(self, asked: str, outline: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
        if _state(outline, asked).get("weights") == {}:
            return f"{self.path}: the plugin {asked!r} had averaged nothing by then."
        there = did_you_mean(asked, kept) if kept else " No plugin of its run keeps one."
        return f"{self.path} holds no average called {asked!r}.{there}"

    @contextmanager
    def _verified(self) -> Iterator[_Files]:
        try:
            with ExitStack() as stack:
                yield _Files(self.path, stack)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}.") from error


def averages(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The averaged weights in a tree or an outline, by plugin: a plugin's state offers them as a dict "weights" of
    tensors that have names of the model's."""
    model = _named_tensors(tree.get("model"))
    offered = {plugin: _state(tree, plugin).get("weights") for plugin in _dict(tree.get("plugins"))}
    return {plugin: weights for plugin, weights in offered.items() if weights and _is_average(weights, model)}


def _is_average(weights: Any, model: set[str]) -> bool:
    return isinstance(weights, dict) and weights.keys() == _named_tensors(weights) <= model


def _named_tensors(values: Any) -> set[str]:
    return {name for name, value in _dict(values).items() if isinstance(value, (Tensor, TensorInfo))}


def _state(tree: Mapping[str, Any], plugin: str) -> dict[str, Any]:
    return _dict(_dict(tree.get("plugins")).get(plugin))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _replaced(model: Mapping[str, Any], average: Mapping[str, Tensor]) -> dict[str, Any]:
    """The model with an average in the place of what it names, and of what is tied to that; dtypes are the model's."""
    place = {id(model[name]): tensor.to(model[name].dtype) for name, tensor in average.items()}
    return {name: place.get(id(value), value) for name, value in model.items()}


class _Files:
    """The open files of a checkpoint, found to be what the manifest says."""

    def __init__(self, path: Path, stack: ExitStack):
        self.path = path
        directory = _open_directory(path)
        stack.callback(os.close, directory)
        with _open(directory, manifest.NAME, path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > manifest.MAX_SIZE:
                raise CheckpointError(f"{path / manifest.NAME} is no manifest: it has {size:,} bytes.")
            self.records = manifest.decode(_read(stream, size), str(path / manifest.NAME))
        self.streams = {name: stack.enter_context(_open(directory, name, path)) for name in manifest.FILES}
        for name in manifest.FILES:
            self._check_size(name)
        self.tensor_bytes = sum(self.records[name].size for name in ("model.safetensors", "state.safetensors"))
        tree.check_size(self.records["state.json"].size, str(path / "state.json"), self.tensor_bytes)
        for name in manifest.FILES:
            self._check_hash(name)
        self.headers = {file: self._header(f"{file}.safetensors") for file in ("model", "state")}

    def tree(self, find: tree.Find) -> dict[str, Any]:
        """The tree, with `find` asked for each tensor once it is sure that there is one."""
        unused = {(file, name) for file, header in self.headers.items() for name in header.entries}

        def checked(file: str, name: str, note: str | None) -> Any:
            entry = self.headers[file].entries.get(name)
            if entry is None or (note is not None and not tensors.fits_note(entry, note)):
                raise CheckpointError(f"{file}.safetensors holds no such tensor as {name[:80]!r}.")
            unused.discard((file, name))
            return find(file, name, note)

        stream = self.streams["state.json"]
        stream.seek(0)
        document = _read(stream, self.records["state.json"].size)
        found = tree.join(document, str(self.path / "state.json"), self.tensor_bytes, checked)
        if unused:
            raise CheckpointError(f"{self.path / 'state.json'} does not mention the tensor {min(unused)[1][:80]!r}.")
        return found

    def describe(self, file: str, name: str, note: str | None) -> TensorInfo:
        entry = self.headers[file].entries[name]
        dtype = note or str(entry.dtype).removeprefix("torch.")
        shape = entry.shape[:-1] if dtype.startswith("complex") else entry.shape
        return TensorInfo(shape, dtype, entry.end - entry.begin, f"{file}:{name}")

    def tensors(self, file: str) -> dict[str, Tensor]:
        name = f"{file}.safetensors"
        return tensors.read_tensors(self.streams[name], self.headers[file], str(self.path / name))

    def tensor(self, info: TensorInfo) -> Tensor:
        """One tensor that `describe` has described."""
        file, _, name = info.place.partition(":")
        entry, start = self.headers[file].entries[name], self.headers[file].start
        alone = tensors.Header({name: entry}, start + entry.begin)
        found = tensors.read_tensors(self.streams[f"{file}.safetensors"], alone, str(self.path / f"{file}.safetensors"))
        return tensors.noted(found[name], info.dtype) if info.dtype in tensors.NOTED else found[name]

    def _header(self, name: str) -> tensors.Header:
        return tensors.read_header(self.streams[name], self.records[name].size, str(self.path / name))

    def _check_size(self, name: str) -> None:
        size = os.fstat(self.streams[name].fileno()).st_size
        if size != self.records[name].size:
            raise CheckpointError(
                f"{self.path / name} is damaged: it has {size:,} bytes; the manifest says {self.records[name].size:,}."
            )

    def _check_hash(self, name: str) -> None:
        digest, buffer, left = hashlib.sha256(), memoryview(bytearray(_CHUNK)), self.records[name].size
        while left and (got := self.streams[name].readinto(buffer[: min(left, _CHUNK)])):
            digest.update(buffer[:got])
            left -= got
        if left or digest.hexdigest() != self.records[name].sha256:
            raise CheckpointError(f"{self.path / name} is damaged: its sha256 is not the one in the manifest.")


class _Tensors:
    """Finds tensors by reading a file when it is first asked for; what is tied stays one tensor."""

    def __init__(self, files: _Files, only: str | None):
        self.files, self.only = files, only
        self.read: dict[str, dict[str, Tensor]] = {}
        self.made: dict[tuple[str, str, str], Tensor] = {}

    def __call__(self, file: str, name: str, note: str | None) -> Tensor | None:
        if self.only not in (None, file):
            return None
        if file not in self.read:
            self.read[file] = self.files.tensors(file)
        tensor = self.read[file][name]
        if note is None:
            return tensor
        return self.made.setdefault((file, name, note), tensors.noted(tensor, note))


def _open_directory(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no checkpoint at {path}.") from error
    except OSError as error:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link, not a checkpoint. Checkpoint.find follows it.") from error
        if error.errno == errno.ENOTDIR:
            raise CheckpointError(f"{path} is not a directory, so it is no checkpoint.") from error
        raise


def _open(directory: int, name: str, path: Path) -> io.FileIO:
    try:
        # O_NONBLOCK: opening a pipe that nobody writes to would wait for ever
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is incomplete: it has no {name}.") from error
    except OSError as error:
        raise CheckpointError(f"{path / name} cannot be opened as a plain file: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path / name} is not a regular file.")
    return io.FileIO(descriptor, "rb")


def _read(stream: io.FileIO, size: int) -> bytes:
    pieces = []
    while size and (piece := stream.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
