"""One cycle of torch's profiler, from its warm-up to the trace."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from forge.torch_internals import profiler_enabled

LOG_LEVEL = "KINETO_LOG_LEVEL"


class Recording:
    """One cycle. torch allows a single profiler at a time, and starting a second would silently end the first: check
    `another_one()` before."""

    def __init__(self, device: torch.device, **options: Any):
        self.updates = 0
        "Updates recorded so far."
        self.first = 0
        "The first of them."
        self.data_waits: dict[int, float] = {}
        "Seconds that each update waited for its data."
        self.ran = 0.0
        "CPU seconds of this thread during the recording."
        self._device, self._options = device, options
        self._records = self._runs = False
        self._ran_before = time.thread_time()

    def record(self, update: int) -> None:
        """Record from now on, beginning with this update."""
        self.first, self._records = update, True
        if self._runs:
            self._profile.step()
        else:
            self.start(update)
        self._ran_before = time.thread_time()

    def next(self) -> None:
        """Begin the next update."""
        self._profile.step()

    def stop(self) -> None:
        """Stop, possibly in the middle. Does nothing the second time."""
        if self._runs:
            self._runs = False
            self.ran = time.thread_time() - self._ran_before
            with _quiet(self._device):
                self._profile.__exit__(None, None, None)

    def write(self, file: Path) -> dict[str, Any]:
        """Write the trace, and return it."""
        with _quiet(self._device):
            self._profile.export_chrome_trace(str(file))
        return json.loads(file.read_bytes())

    def start(self, update: int) -> None:
        """Start the profiler, to warm up if it does not record yet; `update` is the next one."""

        def action(step: int) -> ProfilerAction:
            return ProfilerAction.RECORD if self._records else ProfilerAction.WARMUP

        with _quiet(self._device):
            self._profile = profile(activities=activities(self._device), schedule=action, **self._options)
            self._profile.step_num = update  # a ProfilerStep gets the number of its update
            self._profile.__enter__()
        self._runs = True


def another_one() -> bool:
    """Whether a profiler records in this thread already."""
    return profiler_enabled()


def activities(device: torch.device) -> list[ProfilerActivity]:
    """Return the activities to record for a device."""
    wanted = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}.get(device.type)
    there = [ProfilerActivity.CPU]
    return there if wanted is None or wanted not in torch.profiler.supported_activities() else [*there, wanted]


@contextmanager
def _quiet(device: torch.device) -> Generator[None]:
    """Suppress torch's remark that a profiler clears its events and, without an accelerator, its tracing library's
    messages on stderr about missing accelerators."""
    quiet = device.type == "cpu" and LOG_LEVEL not in os.environ
    if quiet:
        os.environ[LOG_LEVEL] = "99"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            yield
    finally:
        if quiet:
            del os.environ[LOG_LEVEL]
