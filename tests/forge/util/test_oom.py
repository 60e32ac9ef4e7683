"""Errors that say that memory is full."""

from __future__ import annotations

import pytest
import torch

from forge.util.oom import is_out_of_memory


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_an_error_says_whether_memory_is_full(error: Exception, full: bool) -> None:
    assert is_out_of_memory(error) is full


def test_the_cpus_own_error_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
