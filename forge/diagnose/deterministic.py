"""torch's global flags for deterministic algorithms, set for a run and restored."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger("forge")

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
LATE = (
    "deterministic: CUDA was in use before this run, without %s. The run is repeatable in this process; a run in a "
    "fresh process may differ in the last bits. Set %s=:4096:8 in the shell, or begin with this run."
)
_in_time = False
"""Whether CUDA was started in this process while the variable was set."""


@contextmanager
def deterministic_flags(on: bool) -> Iterator[None]:
    """Allow only deterministic algorithms; an operation without one raises an error with its name.

    `torch.utils.deterministic.fill_uninitialized_memory` is left unchanged: torch's default fills uninitialised memory
    with NaN, so that reading it is noticed. It costs a little time, and users may turn it off.
    """
    if not on:
        yield
        return
    global _in_time
    from forge.torch_internals import inductor_config as inductor  # torch imports it too when the mode is set

    cudnn: Any = torch.backends.cudnn
    workspace = os.environ.get(CUBLAS)
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    compiled, exact, benchmark = inductor.deterministic, cudnn.deterministic, cudnn.benchmark
    in_time = _in_time or workspace is not None or not torch.cuda.is_initialized()
    if not in_time:
        logger.warning(LATE, CUBLAS, CUBLAS)
    try:
        os.environ.setdefault(CUBLAS, ":4096:8")  # cuBLAS reads it once, when it starts
        torch.use_deterministic_algorithms(True)  # compiled code too: inductor picks its kernels without timing them
        cudnn.deterministic, cudnn.benchmark = True, False
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        inductor.deterministic, cudnn.deterministic, cudnn.benchmark = compiled, exact, benchmark
        _in_time = in_time and torch.cuda.is_initialized()
        if workspace is None:
            os.environ.pop(CUBLAS, None)
