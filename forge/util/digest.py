"""The one digest of a value, and a sketch of a tensor: what two programs are compared by without keeping their tensors.

Equal bits, dtype and shape have equal digests, in every process, on whatever device and in whatever order of memory:
NaN equals NaN, and 0.0 is not -0.0. A large tensor is folded where it is, so that only a few numbers leave its device.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Set
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.util.walk import frozen, is_atom

LARGE = 2**20
"""Bytes of a tensor above which it is folded."""
PERIOD, BUCKETS, CHUNK = 4096, 16, 2**22
FORM = "v1:"
"""Begins a lasting digest."""
BITS = {1: torch.uint8, 2: torch.int16}


def digest(value: Any) -> str:
    """Return a short digest of nested tensors, arrays, plain values and objects.

    A value without attributes counts by its memory or as it is pickled, and by its type alone where neither is possible
    (an open file, a lock).
    """
    return _Digests().of(value)


def lasting(value: Any) -> str:
    """Return a digest to be kept in a checkpoint, which outlives the way in which digests are made."""
    return FORM + digest(value)


def agrees(kept: str, value: Any) -> bool:
    """Return whether a value may be the one whose lasting digest was kept: one of another form tells nothing."""
    return not kept.startswith(FORM) or kept == lasting(value)


def form(tensor: Tensor) -> str:
    """Return dtype and shape in words."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}"


@torch.no_grad()
def sketch(tensor: Tensor) -> list[float]:
    """Return a few numbers whose distance from those of another tensor is about the distance of the tensors.

    The entries are summed with random signs into buckets. The sketch of a single number is that number.
    """
    flat = in_a_row(tensor)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    if flat.numel() == 1:
        return [float(flat)]
    _, signs = _tables(flat.device)
    sums = torch.zeros(PERIOD, dtype=torch.float64, device=flat.device)
    for chunk in flat.split(CHUNK):
        rows = _in_rows(chunk.to(torch.float64))
        sums += signs[: len(rows)] @ rows
    return (sums * signs).view(-1, BUCKETS).sum(0).tolist()


class _Digests:
    """Digests of nested values; a shared value is digested once."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, str]] = {}
        "Digests by id; the value is kept too, so that no other value gets its id."
        self.open: set[int] = set()
        "The values being digested, outermost first."

    def of(self, value: Any) -> str:
        if id(value) not in self.known:
            summary = hashlib.sha256()
            for piece in self._pieces(value):
                summary.update(len(piece).to_bytes(8, "little"))  # [1, 23] is not [12, 3]
                summary.update(piece)
            self.known[id(value)] = value, summary.hexdigest()[:16]
        return self.known[id(value)][1]

    def _pieces(self, value: Any) -> Iterator[bytes | memoryview]:
        if isinstance(value, Tensor):
            yield from _tensor_pieces(value)
        elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            yield f"{value.dtype.str}{value.shape}".encode()
            yield value.tobytes()
        elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            yield repr(value).encode()
        elif id(value) in self.open:
            yield b"<itself>"
        elif is_atom(value) and not isinstance(value, (Set, np.ndarray, type, ModuleType, FunctionType)):
            yield frozen(value) or type(value).__qualname__.encode()
        else:
            self.open.add(id(value))
            parts = [self.of(key) + self.of(item) for key, item in _items(value)]
            self.open.discard(id(value))
            yield f"{_kind(value)} of {len(parts)}".encode()
            # the order of a set differs between processes
            yield "".join(sorted(parts) if isinstance(value, Set) else parts).encode()


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return (name, part) of everything inside a value."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple, Set)):
        return ((None, item) for item in value)
    if isinstance(value, (type, ModuleType, FunctionType, BuiltinFunctionType)):
        return [("name", getattr(value, "__qualname__", value.__name__))]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    if isinstance(value, nn.Module):
        return value.state_dict().items()
    return getattr(value, "__dict__", {}).items()


def _kind(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "list"
    return "mapping" if isinstance(value, Mapping) else type(value).__qualname__


# -- tensors ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _tensor_pieces(value: Tensor) -> Iterator[bytes | memoryview]:
    yield form(value).encode()
    flat = in_a_row(value)
    if flat.numel() * flat.element_size() <= LARGE:
        yield flat.cpu().view(torch.uint8).numpy().data
        return
    weights, _ = _tables(flat.device)
    bits = flat.view(BITS.get(flat.element_size(), torch.int32))
    left = torch.cat([_row_sums(chunk.to(torch.int64), weights) for chunk in bits.split(CHUNK)])
    while len(left) > 1:
        left = _row_sums(left, weights)
    yield left.cpu().numpy().data


def in_a_row(tensor: Tensor) -> Tensor:
    """Return the entries in one row of memory; of a tensor that ranks share, this rank's."""
    tensor = local() if (local := getattr(tensor, "to_local", None)) is not None else tensor
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    dense = dense.cpu() if dense.device.type == "mps" else dense  # MPS has no float64
    # a dimension of no or one entry may have any stride, which a view as bytes refuses
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1).as_strided((dense.numel(),), (1,))


def _row_sums(numbers: Tensor, weights: Tensor) -> Tensor:
    """Sum each row of PERIOD integers, modulo 2**64: the order makes no difference, and entries of equal sums are equal
    but for a chance of 2**-32."""
    return (_in_rows(numbers) * weights).sum(1)


def _in_rows(flat: Tensor) -> Tensor:
    return F.pad(flat, (0, -len(flat) % PERIOD)).view(-1, PERIOD)


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random odd weights and random signs, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (PERIOD,), generator=generator, device="cpu") * 2 + 1
    signs = torch.randint(2, (PERIOD,), generator=generator, device="cpu").double() * 2 - 1
    return weights.to(device), signs.to(device)
