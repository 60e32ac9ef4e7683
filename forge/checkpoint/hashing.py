"""The hash by which files of a checkpoint are verified, and what of a tensor is hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

new_hash = hashlib.sha256
"""Begin a hash: `new_hash(bytes)`, `.update(more)`, `.hexdigest()`. The manifest calls it by its name, sha256."""


def tensor_pieces(value: Tensor) -> Iterator[bytes | memoryview]:
    """Yield what makes a tensor equal to another, on whatever device and in whatever order of memory: dtype and shape,
    then the values."""
    plain = (value.to_dense() if value.layout is not torch.strided else value).detach().cpu().contiguous()
    yield f"{plain.dtype}{tuple(plain.shape)}".encode()
    # a dimension of no or one entry may have any stride, which a view as bytes refuses
    flat = plain.resolve_conj().resolve_neg().reshape(-1).as_strided((plain.numel(),), (1,))
    yield flat.view(torch.uint8).numpy().data
