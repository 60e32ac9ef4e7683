"""Write safetensors files in one hashing pass, and read them after a strict check of the header.

The files are plain safetensors, readable by its library. The library's writer would copy every tensor once more, and
its reader checks less: here offsets cover the data exactly and no name occurs twice.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge.checkpoint import strict_json
from forge.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""The dtypes that every version of the library can read."""

NOTED = {
    "complex32": torch.complex32,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
}
"""Stored as pairs of real numbers, or as bytes; the document notes their dtype."""

RESERVED = "__metadata__"
"""The one key of a header that does not name a tensor."""

LEAST_HEADER_LIMIT = 8 * 2**20
MOST_HEADER_LIMIT = 100_000_000
BYTES_PER_VALUE = 8
MAX_DIMENSIONS = 64
CHUNK = 4 * 2**20

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_NOTES = {dtype: note for note, dtype in NOTED.items()}
# metadata of one string, then entries of a string and two flat lists: nothing else is ever built
_OUTLINE = re.compile(rb"\{(?::\{:\},?)?(?::\{:,:\[[^][{}:]*+\],:\[[^][{}:]*+\]\},?)*+\}")
_ENTRY_KEYS = ["dtype", "shape", "data_offsets"]


class TensorEntry(NamedTuple):
    """One tensor of a header; offsets are relative to the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """The tensors of a file, in the order of its data, and the offset of the data."""

    entries: dict[str, TensorEntry]
    start: int


def can_store(dtype: torch.dtype) -> bool:
    return dtype in _CODES or dtype in _NOTES


def dtype_note(dtype: torch.dtype) -> str | None:
    """Return the name to note for a dtype that is stored as another one."""
    return _NOTES.get(dtype)


# -- writing ----------------------------------------------------------------------------------------------------------


def encode(tensors: dict[str, Tensor], what: str) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file; tensors on an accelerator are copied one at a time."""
    # wide dtypes first, so that each tensor is aligned in the file
    order = sorted(tensors, key=lambda name: -_stored_as(tensors[name])[0].itemsize)
    header: dict[str, Any] = {RESERVED: {"format": "pt"}}
    position = 0
    for name in order:
        (dtype, shape), end = _stored_as(tensors[name]), position + tensors[name].nbytes
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    _refuse_long_header(text, position, what)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in order:
        data = as_bytes(_on_host(tensors[name]))
        for begin in range(0, len(data), CHUNK):
            yield data[begin : begin + CHUNK]


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # a dimension of size 0 or 1 may have any stride, which a view as bytes rejects
    flat = plain.detach().reshape(-1).as_strided((plain.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _stored_as(tensor: Tensor) -> tuple[torch.dtype, list[int]]:
    if tensor.dtype in _CODES:
        return tensor.dtype, list(tensor.shape)
    return (tensor.dtype.to_real(), [*tensor.shape, 2]) if tensor.is_complex() else (torch.uint8, list(tensor.shape))


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _refuse_long_header(text: bytes, size: int, what: str) -> None:
    limit = header_limit(size)
    if len(text) > limit or strict_json.count_values(text) > limit // BYTES_PER_VALUE:
        raise CheckpointError(
            f"{what} would need a header of {len(text):,} bytes; the limit for the size of its tensors is {limit:,}. "
            "Store many small tensors as one."
        )


# -- reading ----------------------------------------------------------------------------------------------------------


def header_limit(size: int) -> int:
    """Return the longest header allowed; it grows with the file, so that a small file stays harmless."""
    return min(MOST_HEADER_LIMIT, max(LEAST_HEADER_LIMIT, size // 256))


def read_header(stream: io.FileIO, size: int, what: str) -> Header:
    """Parse the header of a safetensors file of `size` bytes, and check that it accounts for every byte."""
    stream.seek(0)
    length = int.from_bytes(_exactly(stream, min(8, size), what), "little")
    if size < 8 or length > size - 8:
        raise CheckpointError(
            f"{what} is not a safetensors file: a header of {length:,} bytes does not fit into {size:,}."
        )
    if length > header_limit(size):
        raise CheckpointError(
            f"{what} has a header of {length:,} bytes; the limit for its size is {header_limit(size):,}."
        )
    text = _exactly(stream, length, what)
    max_values = header_limit(size) // BYTES_PER_VALUE
    found = strict_json.parse(text, f"The header of {what}", max_values, _OUTLINE.fullmatch, _make_object)
    if not isinstance(found, dict):
        raise CheckpointError(f"The header of {what} is not a JSON object.")
    entries = dict(sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_coverage(entries, size - 8 - length, what)
    return Header(entries, 8 + length)


def read_tensors(stream: io.FileIO, header: Header, what: str) -> dict[str, Tensor]:
    """Read every tensor of the header, each into its own memory."""
    stream.seek(header.start)
    found: dict[str, Tensor] = {}
    for name, entry in header.entries.items():
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        _fill(stream, as_bytes(tensor), what)
        found[name] = tensor
    return found


def noted(tensor: Tensor, note: str) -> Tensor:
    """Return a stored tensor in the dtype noted for it."""
    return torch.view_as_complex(tensor) if NOTED[note].is_complex else tensor.view(NOTED[note])


def fits_note(stored: torch.dtype, shape: tuple[int, ...], note: str) -> bool:
    """Whether a stored dtype and shape can hold the noted dtype."""
    dtype = NOTED.get(note)
    if dtype is None:
        return False
    if dtype.is_complex:
        return stored is dtype.to_real() and shape[-1:] == (2,)
    return stored is torch.uint8


def _make_object(pairs: strict_json.Pairs) -> Any:
    """Return an entry, the metadata (None), or the header itself; raise on any other object."""
    if [key for key, _ in pairs] == _ENTRY_KEYS and not isinstance(pairs[0][1], TensorEntry):
        return _make_entry(*(value for _, value in pairs))
    if len(pairs) == 1 and type(pairs[0][1]) is str:
        return None
    values = strict_json.unique(pairs)
    values.pop(RESERVED, None)
    for name, value in values.items():
        if not isinstance(value, TensorEntry):
            raise CheckpointError(f"{name[:80]!r} does not describe a tensor.")
    return values


def _make_entry(code: Any, shape: Any, offsets: Any) -> TensorEntry:
    dtype = DTYPES.get(code) if type(code) is str else None
    if dtype is None:
        raise CheckpointError(f"{str(code)[:20]!r} is not a dtype of a checkpoint.")
    if not are_sizes(shape) or len(shape) > MAX_DIMENSIONS or math.prod(filter(None, shape)) >= 2**62:
        raise CheckpointError("a shape is not a list of valid sizes.")
    if not are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError("data_offsets are not two positions.")
    begin, end = offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"offsets {begin} to {end} do not hold a tensor of shape {shape} and dtype {code}.")
    return TensorEntry(dtype, tuple(shape), begin, end)


def are_sizes(values: Any) -> bool:
    """Whether a parsed value is a list of non-negative ints."""
    return type(values) is list and set(map(type, values)) <= {int} and min(values, default=0) >= 0


def _check_coverage(entries: dict[str, TensorEntry], size: int, what: str) -> None:
    position = 0
    for name, entry in entries.items():
        if entry.begin != position:
            how = "overlaps the tensor before it" if entry.begin < position else "leaves a gap before it"
            raise CheckpointError(f"The header of {what}: {name[:80]!r} {how}.")
        position = entry.end
    if position != size:
        raise CheckpointError(f"The header of {what} describes {position:,} bytes of data; there are {size:,}.")


def _exactly(stream: io.FileIO, size: int, what: str) -> bytes:
    data = bytearray(size)
    _fill(stream, memoryview(data), what)
    return bytes(data)


def _fill(stream: io.FileIO, memory: memoryview, what: str) -> None:
    while len(memory):
        got = stream.readinto(memory)
        if not got:
            raise CheckpointError(f"{what} ends too early.")
        memory = memory[got:]
