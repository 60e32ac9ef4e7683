"""A checksum of a batch, by which two processes tell whether they have the same samples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def digest(samples: Any) -> str:
    """Return a checksum of the tensors, arrays, numbers and texts in samples."""
    checksum = hashlib.sha256()
    waiting = [samples]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
            value = dense.cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            value = value.tolist()  # not its addresses
        if isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, np.ndarray):
            checksum.update(value.tobytes())
        elif value is None or isinstance(value, (bool, int, float, str, bytes, np.generic)):
            checksum.update(repr(value).encode())
    return checksum.hexdigest()[:16]
