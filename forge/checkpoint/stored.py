"""Stored tensors: where the pieces of each are, found from the headers of all files; read as a whole or in part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forge.checkpoint import manifest, slices, tensors
from forge.checkpoint.slices import Box
from forge.errors import CheckpointError

Load = Callable[[str, tensors.Header], dict[str, Tensor]]
"""(file, what to read of it) -> tensors by name."""


class Piece(NamedTuple):
    """A box of a tensor, as an entry of a file's header; `start` is where that file's data begins."""

    file: str
    name: str
    entry: tensors.Entry
    start: int
    box: Box


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the files: its dtype and shape there, and the pieces that it consists of."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, box: Box, load: Load) -> Tensor:
        """One box of the tensor, with memory of its own; only files and rows that it has a part in are read."""
        found = [(common, piece) for piece in self.pieces if (common := slices.overlap(box, piece.box))]
        if len(found) == 1 and found[0][0] == box:
            return _read(found[0][1], box, load)
        made = torch.empty(box.size, dtype=self.dtype, device="cpu")
        for common, piece in found:
            made[common.within(box).slices] = _read(piece, common, load)
        return made


def _read(piece: Piece, box: Box, load: Load) -> Tensor:
    """A box of one piece: the rows that it spans are read, and cut to its other dimensions."""
    here, entry = box.within(piece.box), piece.entry
    first, rows = (here.begin[0], here.size[0]) if box.size else (0, 1)
    row = (entry.end - entry.begin) // max(1, entry.shape[0] if entry.shape else 1)
    begin, shape = entry.begin + first * row, (rows, *entry.shape[1:]) if box.size else ()
    asked = tensors.Entry(entry.dtype, shape, begin, begin + rows * row)
    read = load(piece.file, tensors.Header({piece.name: asked}, piece.start + begin))[piece.name]
    if shape[1:] == box.size[1:]:
        return read
    return read[(slice(None), *here.slices[1:])].clone(memory_format=torch.contiguous_format)


class Index:
    """Every tensor of a checkpoint: whole ones, and those in pieces, once it is sure that nothing is missing."""

    def __init__(self, headers: Mapping[str, tensors.Header], in_pieces: bool, what: str):
        self.whole: dict[tuple[str, str], Piece] = {}
        self.parts: dict[tuple[str, str], list[Piece]] = {}
        for file, header in headers.items():
            kind = manifest.kind_of(file)
            for name, entry in header.entries.items():
                parsed = slices.parse_piece_name(name) if in_pieces else None
                if parsed is None:
                    piece = Piece(file, name, entry, header.start, slices.whole(entry.shape))
                    if self.whole.setdefault((kind, name), piece) is not piece:
                        raise CheckpointError(f"{what}: {file} and another file both hold {name[:80]!r}.")
                else:
                    of, begin = parsed
                    # numbers of two parts have one dimension more in the file than the tensor has
                    begin += (0,) * (len(entry.shape) - len(begin))
                    piece = Piece(file, name, entry, header.start, Box(begin, entry.shape))
                    self.parts.setdefault((kind, of), []).append(piece)
        both = self.whole.keys() & self.parts.keys()
        if both:
            raise CheckpointError(f"{what} holds {min(both)[1][:80]!r} as a whole and in pieces.")
        self._checked: dict[tuple[str, str], Stored] = {}

    def find(self, kind: str, name: str, note: str | None, shape: tuple[int, ...] | None) -> Stored:
        """The tensor that a marker names; its note and its shape must fit what the files hold."""
        stored = self._whole(kind, name) if shape is None else self._in_pieces(kind, name, note, shape)
        if stored is None or (note is not None and not tensors.fits_note(stored.dtype, stored.shape, note)):
            raise CheckpointError(f"{kind}.safetensors holds no such tensor as {name[:80]!r}.")
        return stored

    def _whole(self, kind: str, name: str) -> Stored | None:
        piece = self.whole.get((kind, name))
        return piece and Stored(piece.entry.dtype, piece.entry.shape, (piece,))

    def _in_pieces(self, kind: str, name: str, note: str | None, shape: tuple[int, ...]) -> Stored | None:
        found = self.parts.get((kind, name))
        if found is None:
            return None
        in_file = (*shape, 2) if note is not None and note.startswith("complex") else shape
        stored = self._checked.get((kind, name))
        if stored is None:
            stored = Stored(found[0].entry.dtype, in_file, tuple(found))
            if any(piece.entry.dtype is not stored.dtype for piece in found):
                raise CheckpointError(f"the pieces of {name[:80]!r} have several dtypes.")
            if not slices.cover(in_file, (piece.box for piece in found)):
                raise CheckpointError(f"the pieces of {name[:80]!r} overlap, or leave a gap in {list(shape)}.")
            self._checked[kind, name] = stored
        return stored if stored.shape == in_file else None
