"""Find the pieces of each stored tensor from the headers of all files, and read tensors whole or in part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forge.checkpoint import manifest, slices, tensors
from forge.checkpoint.slices import TensorSlice
from forge.errors import CheckpointError

Load = Callable[[str, tensors.Header], dict[str, Tensor]]
"""(file, entries to read) -> tensors by name."""


class StoredPiece(NamedTuple):
    """A slice of a tensor, as an entry of a file's header; `start` is the offset of that file's data."""

    file: str
    name: str
    entry: tensors.TensorEntry
    start: int
    part: TensorSlice


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the files: its dtype and shape there, and its pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, part: TensorSlice, load: Load) -> Tensor:
        """Read one slice into new memory, from the files and rows that overlap it."""
        found = [(common, piece) for piece in self.pieces if (common := slices.overlap(part, piece.part))]
        if len(found) == 1 and found[0][0] == part:
            return _read(found[0][1], part, load)
        made = torch.empty(part.size, dtype=self.dtype, device="cpu")
        for common, piece in found:
            made[common.within(part).as_index] = _read(piece, common, load)
        return made


def _read(piece: StoredPiece, part: TensorSlice, load: Load) -> Tensor:
    """Read a slice of one piece: the rows that it spans, cut to its other dimensions."""
    here, entry = part.within(piece.part), piece.entry
    first, rows = (here.begin[0], here.size[0]) if part.size else (0, 1)
    row = (entry.end - entry.begin) // max(1, entry.shape[0] if entry.shape else 1)
    begin, shape = entry.begin + first * row, (rows, *entry.shape[1:]) if part.size else ()
    asked = tensors.TensorEntry(entry.dtype, shape, begin, begin + rows * row)
    read = load(piece.file, tensors.Header({piece.name: asked}, piece.start + begin))[piece.name]
    if shape[1:] == part.size[1:]:
        return read
    return read[(slice(None), *here.as_index[1:])].clone(memory_format=torch.contiguous_format)


class Index:
    """Every tensor of a checkpoint, whole or in pieces."""

    def __init__(self, headers: Mapping[str, tensors.Header], in_pieces: bool, what: str):
        self.whole: dict[tuple[str, str], StoredPiece] = {}
        self.pieces: dict[tuple[str, str], list[StoredPiece]] = {}
        for file, header in headers.items():
            kind = manifest.kind_of(file)
            for name, entry in header.entries.items():
                parsed = slices.parse_piece_name(name) if in_pieces else None
                if parsed is None:
                    piece = StoredPiece(file, name, entry, header.start, slices.whole(entry.shape))
                    if self.whole.setdefault((kind, name), piece) is not piece:
                        raise CheckpointError(f"{what}: {file} and another file both hold {name[:80]!r}.")
                else:
                    of, begin = parsed
                    # complex numbers have one dimension more in the file
                    begin += (0,) * (len(entry.shape) - len(begin))
                    piece = StoredPiece(file, name, entry, header.start, TensorSlice(begin, entry.shape))
                    self.pieces.setdefault((kind, of), []).append(piece)
        both = self.whole.keys() & self.pieces.keys()
        if both:
            raise CheckpointError(f"{what} holds {min(both)[1][:80]!r} as a whole and in pieces.")
        self._checked: dict[tuple[str, str], Stored] = {}

    def find(self, kind: str, name: str, note: str | None, shape: tuple[int, ...] | None) -> Stored:
        """Return the tensor of a marker, whose note and shape must match the files."""
        stored = self._whole(kind, name) if shape is None else self._in_pieces(kind, name, note, shape)
        if stored is None or (note is not None and not tensors.fits_note(stored.dtype, stored.shape, note)):
            raise CheckpointError(f"{kind}.safetensors holds no matching tensor {name[:80]!r}.")
        return stored

    def _whole(self, kind: str, name: str) -> Stored | None:
        piece = self.whole.get((kind, name))
        return piece and Stored(piece.entry.dtype, piece.entry.shape, (piece,))

    def _in_pieces(self, kind: str, name: str, note: str | None, shape: tuple[int, ...]) -> Stored | None:
        found = self.pieces.get((kind, name))
        if found is None:
            return None
        in_file = (*shape, 2) if note is not None and note.startswith("complex") else shape
        stored = self._checked.get((kind, name))
        if stored is None:
            stored = Stored(found[0].entry.dtype, in_file, tuple(found))
            if any(piece.entry.dtype is not stored.dtype for piece in found):
                raise CheckpointError(f"the pieces of {name[:80]!r} have several dtypes.")
            if not slices.cover(in_file, (piece.part for piece in found)):
                raise CheckpointError(f"the pieces of {name[:80]!r} overlap, or leave a gap in {list(shape)}.")
            self._checked[kind, name] = stored
        return stored if stored.shape == in_file else None
