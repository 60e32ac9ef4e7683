"""Global switches of torch that a run sets and puts back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_flags(on: bool) -> Iterator[None]:
    """Only deterministic algorithms, for as long as this lasts; an operation that has none raises and names itself."""
    if not on:
        yield
        return
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it first starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        torch.backends.cudnn.benchmark = benchmark
