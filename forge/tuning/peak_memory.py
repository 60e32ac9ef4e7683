"""Memory: how much a trial takes at its peak, and a clean start."""

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
    """Give back what nobody uses any more, so that the next trial finds memory as the first one did."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):  # the C library of Linux keeps freed memory for later
        ctypes.CDLL(None).malloc_trim(0)


def start(device: torch.device) -> None:
    """Measure the peak from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with suppress(OSError):
            RESET.write_text("5")  # Linux: the peak of this process becomes what it takes now


def peak(device: torch.device) -> int | None:
    """Bytes at the peak: taken from a CUDA device, or by the whole process on a CPU; None where nobody knows."""
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
