"""The peak memory of a trial."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from contextlib import suppress
from pathlib import Path

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def clean() -> None:
    """Release unused memory, so that every trial starts with the same amount."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):  # the C library of Linux keeps freed memory
        ctypes.CDLL(None).malloc_trim(0)


def start(device: torch.device) -> None:
    """Measure the peak from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with suppress(OSError):
            RESET.write_text("5")  # Linux: reset the peak of this process to its present size


def peak(device: torch.device) -> int | None:
    """Return the peak bytes of a CUDA device, or of the whole process on a CPU; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    if device.type != "cpu":
        return None
    with suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
        if found:
            return int(found.group(1)) * 1024
    with suppress(ImportError):
        import resource

        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else largest * 1024
    return None
