"""A stored checkpoint: one directory, checked against its manifest before anything in it is parsed.

    manifest.json        size and sha256 of every other file, and of itself
    state.json           the tree, with markers in place of tensors          (forge.checkpoint.tree)
    model.safetensors    the task's weights by name                          (forge.checkpoint.tensors)
    state.safetensors    all other tensors

Several ranks write format version 2, each rank its own files (`model-00001-of-00004.safetensors`): whole tensors,
distributed by size, and pieces of sharded tensors, named by their offset (forge.checkpoint.sharding). The reader joins
pieces only after checking that they cover the tensor exactly once.

Files are opened by fixed names, relative to the directory, never through a link, and only if they are regular files of
the size in the manifest. Hostile content results in a CheckpointError or in plain data; it cannot run code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from forge.checkpoint import manifest, slices, tensors, tree
from forge.checkpoint.directory import Directory
from forge.checkpoint.hashing import new_hash
from forge.checkpoint.readers import ALONE, Readers
from forge.checkpoint.slices import TensorSlice
from forge.checkpoint.stored import Index, Stored
from forge.checkpoint.strides import check_strides, with_strides
from forge.errors import CheckpointError, did_you_mean

NAME = re.compile(r"update-([0-9]{8}|[1-9][0-9]{8,15})")
"""The name of a checkpoint in a run, with the number of updates made."""

_CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a checkpoint, without its data."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    place: str
    "Where it is stored; tied tensors share one place."


Keys = tuple[str | int, ...]
"""The path of a value in the tree."""

Read = Callable[..., Tensor]
"""`read()` returns the whole tensor on the CPU, `read(part)` only that slice, from the files that hold it."""

Place = Callable[[Keys, TensorInfo, Read], Any]
"""Returns the value that replaces a tensor in the loaded tree."""


class StoredCheckpoint:
    """A checkpoint directory; nothing is read on construction."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"StoredCheckpoint({str(self.path)!r})"

    @property
    def update(self) -> int:
        """The number of updates made, from the name."""
        match = NAME.fullmatch(self.path.name)
        if match is None:
            raise CheckpointError(f"{self.path} is not named update-XXXXXXXX, so its update is unknown.")
        return int(match[1])

    @classmethod
    def find(cls, path: str | Path) -> StoredCheckpoint:
        """Resolve a path to a checkpoint, a link to one, or a run folder (its newest valid one)."""
        from forge.checkpoint.folder import find

        return find(Path(path))

    def verify(self, readers: Readers = ALONE) -> None:
        """Read every byte; raise CheckpointError unless `load` would return exactly the saved state."""
        with self._verified(readers) as files:
            files.outline()

    def load(self, only: str | None = None, place: Place | None = None, readers: Readers = ALONE) -> dict[str, Any]:
        """Verify, then return the saved tree with tensors on the CPU; tied tensors are tied again.

        `only="model"` loads the model's tensors and replaces all others by None, `only="state"` the reverse. `place`
        decides how each tensor is read: see `forge.checkpoint.placing`. `readers` share the hashing of files.
        """
        with self._verified(readers) as files:
            return files.load(only, place or (lambda path, info, read: read()))

    def outline(self) -> dict[str, Any]:
        """Verify, then return the tree with a TensorInfo in place of every tensor."""
        with self._verified() as files:
            return files.outline()

    def weights(self) -> dict[str, Tensor]:
        """Verify, then return the model's tensors by name; tied ones appear under each name."""
        model = self.load(only="model").get("model")
        if not isinstance(model, dict):
            raise CheckpointError(f"{self.path} holds no model.")
        return {name: value for name, value in model.items() if isinstance(value, Tensor)}

    def load_weights(self, average: str | None = None) -> dict[str, Any]:
        """Return `load(only="model")`, with the trained weights replaced by the average of the plugin `average`."""
        if average is None:
            return self.load(only="model")
        with self._verified() as files:
            outline = files.outline()
            kept = averages(outline)
            if average not in kept:
                raise CheckpointError(self._no_average(average, outline, kept))
            tree = files.load("model", lambda path, info, read: read())
            read = {name: files.read(info) for name, info in kept[average].items()}
        return {**tree, "model": _replaced(tree["model"], read)}

    def _no_average(self, asked: str, outline: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
        if _state(outline, asked).get("weights") == {}:
            return f"{self.path}: the plugin {asked!r} had averaged nothing yet."
        there = did_you_mean(asked, kept) if kept else " No plugin of its run keeps one."
        return f"{self.path} holds no average called {asked!r}.{there}"

    @contextmanager
    def _verified(self, readers: Readers = ALONE) -> Iterator[_Files]:
        try:
            with ExitStack() as stack:
                yield _Files(self.path, stack, readers)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}.") from error


def averages(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the averaged weights in a tree or an outline, by plugin: a dict "weights" in the plugin's state whose
    tensors have names of the model."""
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
    """Return the model with averaged tensors, and those tied to them, replaced; the model's dtypes stay."""
    place = {id(model[name]): tensor.to(model[name].dtype) for name, tensor in average.items()}
    return {name: place.get(id(value), value) for name, value in model.items()}


class _Files:
    """The open files of a checkpoint, checked against the manifest."""

    def __init__(self, path: Path, stack: ExitStack, readers: Readers):
        self.path = path
        self.stored: dict[str, Stored] = {}
        self.strides: dict[str, tuple[int, ...]] = {}
        with readers.agreeing():
            self._open(path, stack, readers)

    def _open(self, path: Path, stack: ExitStack, readers: Readers) -> None:
        self.directory = Directory(path, stack)
        size = self.directory.size(manifest.NAME)
        if size > manifest.MAX_SIZE:
            raise CheckpointError(f"{path / manifest.NAME} is not a manifest: it has {size:,} bytes.")
        self.records = manifest.decode(self.directory.read(manifest.NAME, size), str(path / manifest.NAME))
        for name in self.records:
            self._check_size(name)
        files = [name for name in self.records if name != manifest.DOCUMENT]
        self.tensor_bytes = sum(self.records[name].size for name in files)
        tree.check_size(self.records[manifest.DOCUMENT].size, str(path / manifest.DOCUMENT), self.tensor_bytes)
        for name in (manifest.DOCUMENT, *readers.share({name: self.records[name].size for name in files})):
            self._check_hash(name)
        headers = {name: self._header(name) for name in files}
        self.index = Index(headers, in_pieces=len(files) > 2, what=str(path))

    def outline(self) -> dict[str, Any]:
        """Return the tree with a TensorInfo for every tensor, each checked to exist."""
        unused = self.index.whole.keys() | self.index.pieces.keys()
        shapes: dict[str, tuple[int, ...]] = {}

        def describe(file: str, name: str, note: str | None, shape: tuple[int, ...] | None) -> TensorInfo:
            stored = self.index.find(file, name, note, shape)
            unused.discard((file, name))
            dtype = note or str(stored.dtype).removeprefix("torch.")
            shape = stored.shape[:-1] if dtype.startswith("complex") else stored.shape
            self.stored[f"{file}:{name}"] = stored
            shapes[f"{file}:{name}"] = shape
            return TensorInfo(shape, dtype, stored.bytes, f"{file}:{name}")

        document = self.directory.read(manifest.DOCUMENT, self.records[manifest.DOCUMENT].size)
        found = tree.join(document, str(self.path / manifest.DOCUMENT), self.tensor_bytes, describe)
        if unused:
            missed = min(unused)[1][:80]
            raise CheckpointError(f"{self.path / manifest.DOCUMENT} does not mention the tensor {missed!r}.")
        for file, noted in _dict(found.pop(tree.STRIDES, None)).items():
            for name, strides in _dict(noted).items():
                place = f"{file}:{name}"
                self.strides[place] = check_strides(shapes.get(place, ()), strides, place)
        return found

    def load(self, only: str | None, place: Place) -> dict[str, Any]:
        """Return the tree, with tensors as `place` reads them."""
        outline = self.outline()
        uses = Counter(info.place for info in _infos(outline))
        kept: dict[tuple[str, str, TensorSlice | None], Tensor] = {}

        def fill(path: Keys, info: TensorInfo) -> Any:
            if only not in (None, info.place.partition(":")[0]):
                return None

            def read(part: TensorSlice | None = None) -> Tensor:
                if uses[info.place] == 1:
                    return self.read(info, part)
                key = (info.place, info.dtype, part)
                if key not in kept:  # tied tensors stay one tensor
                    kept[key] = self.read(info, part)
                return kept[key]

            return place(path, info, read)

        return _filled(outline, (), fill)

    def read(self, info: TensorInfo, part: TensorSlice | None = None) -> Tensor:
        """Read one tensor of the outline, or a slice of it."""
        stored, strides = self.stored[info.place], self.strides.get(info.place) if part is None else None
        part = part or slices.whole(info.shape)
        if info.dtype.startswith("complex"):
            part = TensorSlice((*part.begin, 0), (*part.size, 2))
        found = stored.read(part, self._load)
        found = tensors.noted(found, info.dtype) if info.dtype in tensors.NOTED else found
        return found if strides is None else with_strides(found, strides)

    def _load(self, name: str, header: tensors.Header) -> dict[str, Tensor]:
        return tensors.read_tensors(self.directory.open(name), header, str(self.path / name))

    def _header(self, name: str) -> tensors.Header:
        return tensors.read_header(self.directory.open(name), self.records[name].size, str(self.path / name))

    def _check_size(self, name: str) -> None:
        size = self.directory.size(name)
        if size != self.records[name].size:
            raise CheckpointError(
                f"{self.path / name} is damaged: it has {size:,} bytes; the manifest says {self.records[name].size:,}."
            )

    def _check_hash(self, name: str) -> None:
        stream = self.directory.open(name)
        digest, buffer, left = new_hash(), memoryview(bytearray(_CHUNK)), self.records[name].size
        stream.seek(0)
        while left and (got := stream.readinto(buffer[: min(left, _CHUNK)])):
            digest.update(buffer[:got])
            left -= got
        if left or digest.hexdigest() != self.records[name].sha256:
            raise CheckpointError(f"{self.path / name} is damaged: its sha256 differs from the manifest.")


def _infos(value: Any) -> Iterator[TensorInfo]:
    """Yield every TensorInfo of an outline, repeated if it occurs repeatedly."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, TensorInfo):
            yield value
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)


def _filled(value: Any, path: Keys, fill: Callable[[Keys, TensorInfo], Any]) -> Any:
    """Replace every TensorInfo of an outline, in place where possible."""
    if isinstance(value, TensorInfo):
        return fill(path, value)
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            value[key] = _filled(item, (*path, key), fill)
    elif isinstance(value, tuple):
        items = list(value)
        for key, item in enumerate(items):
            items[key] = _filled(item, (*path, key), fill)
        return tuple(items)
    return value
