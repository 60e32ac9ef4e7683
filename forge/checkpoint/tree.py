"""Split a tree of plain data and tensors into a JSON document and named tensors, and join them again exactly.

JSON has no tuples, int keys, NaN or tensors. An object with a key that begins with `$` stands for one::

    {"$state": "optimizers.state.w.exp_avg"}    a tensor of state.safetensors, by name
    {"$model": "encoder.weight"}                a tensor of model.safetensors
    {"$state": ["plugins.fft", "complex64"]}    a tensor whose dtype the file cannot name
    {"$model": ["w", null, [8, 3]]}             a tensor of this shape, in pieces in the files of several ranks
    {"$tuple": [...]}                           a tuple
    {"$dict": [[key, value], ...]}              a dict with int keys, or with keys that begin with `$`
    {"$int": "0x..."}  {"$float": "7ff8..."}    an int beyond 64 bits; the bits of a NaN or an infinity
    {"$str": "eda080"}                          text that UTF-8 cannot hold (lone surrogates), in hexadecimal

A user's dict with such a key is written as a `$dict`, so that no value can be mistaken for a marker. Tensors that share
memory (tied weights) are stored once, under the first name. The key `strides` of the tree, if present, holds the
strides of tensors that are not in row-major order, by file and name; older versions of forge ignore it.
"""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from forge.checkpoint import sharding, strict_json
from forge.checkpoint.slices import parse_piece_name
from forge.checkpoint.strides import strides_to_note
from forge.checkpoint.tensors import MAX_DIMENSIONS, RESERVED, are_sizes, can_store, dtype_note
from forge.checkpoint.writers import Writers
from forge.errors import CheckpointError

MAX_DEPTH = 100
"""Levels of a tree: far more than state needs; a tree that contains itself exceeds them."""

STRIDES = "strides"
"""The key of the tree that is not the caller's."""

LEAST_LIMIT = 8 * 2**20
BYTES_PER_VALUE = 32

_OUTLINE = strict_json.no_deeper_than(3 * MAX_DEPTH + 10)  # a `$dict` takes three brackets per level

Find = Callable[[str, str, str | None, tuple[int, ...] | None], Any]
"""(file, name, dtype note, shape if in pieces) -> the tensor; file is "model" or "state"."""


@dataclass(frozen=True, slots=True)
class Split:
    """The content of a checkpoint's files, or of one rank's files."""

    document: bytes
    "The tree as JSON, with markers in place of tensors."
    model: dict[str, Tensor]
    "Tensors under the tree's key `model`, by name."
    state: dict[str, Tensor]
    "All other tensors, by their path in the tree."
    layout: str = ""
    "A digest of the tensors of all ranks, if several write."


def split(tree: dict[str, Any], writers: Writers | None = None) -> Split:
    """Split a tree into a document and references to its tensors; raise, naming the path, on an unsupported value.

    With `writers`, return the tensors that this rank writes, including pieces of DTensors.
    """
    document, tensors = _encode(tree, in_pieces=writers is not None)
    if writers is not None:
        mine = sharding.share(tensors, writers.rank, writers.world)
        return Split(document, mine["model"], mine["state"], sharding.layout(tensors))
    for file, named in tensors.items():
        for name, tensor in named.items():
            if sharding.is_cut(tensor):
                raise CheckpointError(f"{file}: {name} is sharded over several ranks, which must save it together.")
            named[name] = sharding.on_one_rank(tensor)
    return Split(document, tensors["model"], tensors["state"])


def _encode(tree: dict[str, Any], in_pieces: bool = False) -> tuple[bytes, sharding.Named]:
    """Return the document, and every tensor of the tree."""
    if type(tree) not in (dict, OrderedDict):
        raise CheckpointError(f"A checkpoint holds a dict, not a {_name_of(type(tree))}.")
    if STRIDES in tree:
        raise CheckpointError(f"A checkpoint has its own key {STRIDES!r}. Use another name.")
    splitter = _Splitter(in_pieces)
    # the model first: tensors that it shares with other state are stored in its file
    first = {key: splitter.encode(tree[key], (key,)) for key in ("model",) if key in tree}
    encoded = splitter.encode_dict(tree, (), first)
    if any(splitter.strides.values()):
        noted = splitter.encode_dict(splitter.strides, (), {})
        encoded["$dict"].append([STRIDES, noted]) if "$dict" in encoded else encoded.update({STRIDES: noted})
    document = json.dumps(encoded, allow_nan=False, separators=(",", ":")).encode("ascii")
    named = splitter.tensors.values()
    _refuse_too_large(document, sum(tensor.nbytes for tensors in named for tensor in tensors.values()))
    return document, splitter.tensors


def check_savable(tree: dict[str, Any]) -> None:
    """Raise a CheckpointError that names the first value of a tree that a checkpoint cannot hold. A lazy parameter can
    be saved once a batch has given it its shape."""
    model = tree["model"] if isinstance(tree, dict) and "model" in tree else None
    shaped = {k: v for k, v in model.items() if not is_lazy(v)} if isinstance(model, dict) else model
    _encode(tree if model is None else {**tree, "model": shaped})


def join(document: bytes, what: str, tensor_bytes: int, find: Find) -> dict[str, Any]:
    """Return the tree of a document, with tensors from `find`; raise CheckpointError on invalid content."""
    check_size(len(document), what, tensor_bytes)
    max_values = size_limit(tensor_bytes) // BYTES_PER_VALUE
    tree = strict_json.parse(document, what, max_values, _OUTLINE, lambda pairs: _decode(pairs, find))
    if not isinstance(tree, dict):
        raise CheckpointError(f"{what} does not hold a dict.")
    return tree


def size_limit(tensor_bytes: int) -> int:
    """Return the largest document allowed; it grows with the tensors, so that a small file stays harmless."""
    return max(LEAST_LIMIT, tensor_bytes // 256)


def check_size(size: int, what: str, tensor_bytes: int) -> None:
    """Raise if a document is too large for the tensors it describes."""
    if size > size_limit(tensor_bytes):
        raise CheckpointError(f"{what} has {size:,} bytes; the limit for its tensors is {size_limit(tensor_bytes):,}.")


def _refuse_too_large(document: bytes, tensor_bytes: int) -> None:
    limit, values = size_limit(tensor_bytes), strict_json.count_values(document)
    if len(document) > limit or values > limit // BYTES_PER_VALUE:
        raise CheckpointError(
            f"The state beside the tensors takes {len(document):,} bytes of JSON with about {values:,} values; "
            f"the limit is {limit:,} bytes and {limit // BYTES_PER_VALUE:,} values. Store long lists as tensors."
        )


# -- splitting --------------------------------------------------------------------------------------------------------


class _Splitter:
    def __init__(self, in_pieces: bool) -> None:
        self.in_pieces = in_pieces
        self.tensors: sharding.Named = {"model": {}, "state": {}}
        self.strides: dict[str, dict[str, list[int]]] = {"model": {}, "state": {}}
        self.places: dict[tuple[Any, ...], dict[str, Any]] = {}

    def encode(self, value: Any, path: tuple[str | int, ...]) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is str:
            return value if _is_text(value) else {"$str": value.encode("utf-8", "surrogatepass").hex()}
        if isinstance(value, Tensor):
            return self.refer(value, path)
        if len(path) > MAX_DEPTH:
            raise CheckpointError(f"{_dotted(path[:5])}… is nested deeper than {MAX_DEPTH} levels, or contains itself.")
        if kind is list:
            return [self.encode(item, (*path, i)) for i, item in enumerate(value)]
        if kind is tuple:
            return {"$tuple": [self.encode(item, (*path, i)) for i, item in enumerate(value)]}
        if kind is dict or kind is OrderedDict:
            return self.encode_dict(value, path, {})
        raise CheckpointError(
            f"{_dotted(path)} is a {_name_of(kind)}, which a checkpoint cannot hold. Make it a tensor, int, float, "
            "str, bool or None, or a list, tuple or dict of these."
        )

    def encode_dict(self, value: dict[Any, Any], path: tuple[str | int, ...], done: dict[str, Any]) -> dict[str, Any]:
        """Encode a dict; `done` holds entries that are already encoded."""
        for key in value:
            if type(key) is not str and type(key) is not int:
                raise CheckpointError(
                    f"{_dotted(path)} has the key {key!r}, a {_name_of(type(key))}. Keys are str or int."
                )
        pairs = {key: done[key] if key in done else self.encode(item, (*path, key)) for key, item in value.items()}
        if all(type(key) is str and not key.startswith("$") and _is_text(key) for key in pairs):
            return pairs
        return {"$dict": [[self.encode(key, path), item] for key, item in pairs.items()]}

    def refer(self, tensor: Tensor, path: tuple[str | int, ...]) -> dict[str, Any]:
        """Return the marker for a tensor, and add the tensor to its file unless its memory is stored already."""
        _check_tensor(tensor, path)
        place = sharding.place_of(tensor)
        if tensor.numel() and place in self.places:
            return self.places[place]
        file = "model" if path[0] == "model" else "state"
        name = self._free_name(file, _dotted(path[1:] if file == "model" and len(path) > 1 else path))
        self.tensors[file][name] = tensor
        strides = strides_to_note(tensor)
        if strides is not None:
            self.strides[file][name] = strides
        note = dtype_note(tensor.dtype)
        if sharding.is_cut(tensor):
            marker = {f"${file}": [name, note, list(tensor.shape)]}
        else:
            marker = {f"${file}": name if note is None else [name, note]}
        return self.places.setdefault(place, marker) if tensor.numel() else marker

    def _free_name(self, file: str, wanted: str) -> str:
        """Return a unique name: paths can look alike (`a.b` may be one key or two), or like the name of a piece."""
        name, count = wanted, 1
        while name in self.tensors[file] or name == RESERVED or (self.in_pieces and parse_piece_name(name)):
            count += 1
            name = f"{wanted}#{count}"
        return name


def _check_tensor(tensor: Tensor, path: tuple[str | int, ...]) -> None:
    if sharding.is_distributed(tensor):
        why = sharding.obstacle(tensor)
        if why is None:
            part, held = tensor.to_local(), sharding.held_by(tensor)
            return _check_tensor(part if held is None else sharding.mark_held(part, held), path)
    elif type(tensor) not in (Tensor, nn.Parameter):
        why = f"is a {_name_of(type(tensor))}; only plain tensors can be saved"
    elif tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        why = "is a sparse, quantized or nested tensor; save its parts"
    elif tensor.is_meta and sharding.held_by(tensor) is None:
        why = "is on the meta device and holds no data"
    elif not can_store(tensor.dtype):
        why = f"has the dtype {tensor.dtype}, which safetensors cannot hold; view it as uint8"
    else:
        return None
    raise CheckpointError(f"{_dotted(path)} {why}.")


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in value)


def _dotted(path: tuple[str | int, ...]) -> str:
    text = ".".join(map(str, path)) or "the tree"
    return text.encode("utf-8", "backslashreplace").decode()


def _name_of(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# -- joining ----------------------------------------------------------------------------------------------------------


def _decode(pairs: strict_json.Pairs, find: Find) -> Any:
    """Return the value of an object whose content is already decoded."""
    if not any(key.startswith("$") for key, _ in pairs):
        return strict_json.unique(pairs)
    if len(pairs) == 1:
        marker, body = pairs[0]
        decode = _DECODERS.get(marker)
        if decode is not None:
            return decode(body)
        if marker in ("$model", "$state"):
            return _find_tensor(marker[1:], body, find)
    raise CheckpointError(f"{pairs[0][0][:80]!r} is not a marker known to this version of forge.")


def _find_tensor(file: str, body: Any, find: Find) -> Any:
    if type(body) is str:
        return find(file, body, None, None)
    if type(body) is list and len(body) == 2 and type(body[0]) is str and type(body[1]) is str:
        return find(file, body[0], body[1], None)
    if type(body) is list and len(body) == 3 and type(body[0]) is str and (body[1] is None or type(body[1]) is str):
        shape = body[2]
        if are_sizes(shape) and 0 < len(shape) <= MAX_DIMENSIONS:
            return find(file, body[0], body[1], tuple(shape))
    raise _odd(f"${file}")


def _decode_tuple(body: Any) -> tuple[Any, ...]:
    if type(body) is not list:
        raise _odd("$tuple")
    return tuple(body)


def _decode_dict(body: Any) -> dict[str | int, Any]:
    if type(body) is not list:
        raise _odd("$dict")
    found: dict[str | int, Any] = {}
    for pair in body:
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) not in (str, int) or pair[0] in found:
            raise _odd("$dict")
        found[pair[0]] = pair[1]
    return found


def _decode_int(body: Any) -> int:
    if type(body) is not str or not body.removeprefix("-").startswith("0x"):
        raise _odd("$int")
    try:
        return int(body, 16)
    except ValueError as error:
        raise _odd("$int") from error


def _decode_float(body: Any) -> float:
    return struct.unpack(">d", _unhex("$float", body, 8))[0]


def _decode_str(body: Any) -> str:
    try:
        return _unhex("$str", body).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise _odd("$str") from error


def _unhex(marker: str, body: Any, length: int | None = None) -> bytes:
    try:
        data = bytes.fromhex(body)
    except (TypeError, ValueError) as error:
        raise _odd(marker) from error
    if length is not None and len(data) != length:
        raise _odd(marker)
    return data


def _odd(marker: str) -> CheckpointError:
    return CheckpointError(f"the value of {marker} is invalid.")


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": _decode_tuple,
    "$dict": _decode_dict,
    "$int": _decode_int,
    "$float": _decode_float,
    "$str": _decode_str,
}
