"""What the machine does while a run trains: GPU, CPU, memory and disk."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import forge
from forge.errors import RecipeError

logger = logging.getLogger("forge")

Reader = Callable[[], dict[str, float]]
"""Reads some figures now."""
PROC = Path("/proc")
GB = 1e9


class System(forge.Plugin):
    """Log how busy the machine is: GPUs, CPU, memory and disk.

    When to use it: to see whether a GPU waits, runs hot or is throttled, and whether memory or a disk
    fills up. A thread reads the figures, so that no update waits for them; an update costs one comparison.

    What you see: each log has the mean of what was read since the log before. Of each GPU that the run sees:
    `system/gpu0_percent` (the share of time in which it computed something), `gpu0_memory_gb` (used by all processes),
    `gpu0_watts` and `gpu0_celsius`. Of the host: `system/cpu_percent` (of all cores), `process_cpu_percent` (of one
    core, this process alone), `ram_gb` (in use), `process_ram_gb` and `disk_free_gb` (where the run folder is). GPUs
    are read through NVML: `pip install 'forge-trainer[system]'`; without it, and away from Linux, the others are logged
    alone. On several ranks, it is the host of rank 0.

    ::

        forge fit quickstart -p system trainer.max_epochs=3
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        every: float = 2.0
        "Seconds between two readings."

    config: Config
    observer = True
    provides = ("system_metrics",)
    charts = {
        "system/GPU utilisation, in percent": r"system/gpu\d+_percent",
        "system/GPU memory, in GB": r"system/gpu\d+_memory_gb",
        "system/GPU power, in watts": r"system/gpu\d+_watts",
        "system/GPU temperature, in °C": r"system/gpu\d+_celsius",
        "system/CPU, in percent": r"system/(process_)?cpu_percent",
        "system/memory, in GB": r"system/(process_)?ram_gb",
        "system/free disk, in GB": r"system/disk_free_gb",
    }

    def __init__(self, *first: Any, **values: Any):
        super().__init__(*first, **values)
        if self.config.every <= 0:
            raise RecipeError(f"system.every is {self.config.every:g}; it must be above 0, in seconds.")
        self._sampler: Sampler | None = None

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        if trainer.verb == "fit" and trainer.env.is_main:
            folder = trainer.run_dir or Path()
            self._sampler = Sampler(readers(trainer.env.device, folder), self.config.every)

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        if self._sampler is not None and step.ends_interval:
            step.trainer.publish({f"system/{name}": value for name, value in self._sampler.take().items()})

    @forge.hookimpl
    def forge_end(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None


class Sampler:
    """A thread that reads figures at an interval, and gives their means."""

    def __init__(self, sources: list[Reader], every: float):
        self._sources, self._every = sources, every
        self._read: dict[str, list[float]] = {}
        self._mutex, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="forge-system", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """Return the mean of each figure since the last call; empty if nothing was read since."""
        with self._mutex:
            read, self._read = self._read, {}
        return {name: fmean(values) for name, values in read.items()}

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            for source in list(self._sources):
                try:
                    found = source()
                except Exception as error:  # a driver that goes away must not end the run
                    logger.warning("system: a figure cannot be read any more: %s", error)
                    self._sources.remove(source)
                    continue
                with self._mutex:
                    for name, value in found.items():
                        self._read.setdefault(name, []).append(value)
            if self._over.wait(self._every):
                return


def readers(device: torch.device, folder: Path) -> list[Reader]:
    """Return what can be read on this machine."""
    found: list[Reader] = [lambda: {"disk_free_gb": shutil.disk_usage(_existing(folder)).free / GB}]
    if (PROC / "stat").exists():
        found += [Busy(), _memory]
    if device.type == "cuda":
        found += _gpus()
    return found


class Busy:
    """Reads how busy the CPUs were since it was last asked."""

    def __init__(self) -> None:
        self._before = self._counters()

    def __call__(self) -> dict[str, float]:
        now, before = self._counters(), self._before
        total, idle, own = (a - b for a, b in zip(now, before, strict=True))
        if total <= 0:
            return {}
        self._before = now
        cores = os.cpu_count() or 1
        return {"cpu_percent": 100 * (1 - idle / total), "process_cpu_percent": 100 * own * cores / total}

    def _counters(self) -> tuple[float, float, float]:
        """Return the ticks of all cores, those in which they were idle, and those of this process."""
        ticks = [int(word) for word in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        own = (PROC / "self" / "stat").read_text().rpartition(")")[2].split()
        return float(sum(ticks)), float(ticks[3] + ticks[4]), float(own[11]) + float(own[12])


def _memory() -> dict[str, float]:
    lines = (line.split() for line in (PROC / "meminfo").read_text().splitlines())
    sizes = {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if len(words) > 1}
    own = int((PROC / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"ram_gb": (sizes["MemTotal"] - sizes["MemAvailable"]) / GB, "process_ram_gb": own / GB}


def _gpus() -> list[Reader]:
    """Return a reader for each GPU that this process sees; none, with a word about it, without NVML."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
    except Exception as error:
        logger.warning("system: GPUs are left out, NVML is not there (%s): pip install 'forge-trainer[system]'", error)
        return []

    def reader(number: int) -> Reader:
        uuid = f"GPU-{torch.cuda.get_device_properties(number).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

        def read() -> dict[str, float]:
            memory: Any = pynvml.nvmlDeviceGetMemoryInfo(handle)
            return {
                f"gpu{number}_percent": float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
                f"gpu{number}_memory_gb": memory.used / GB,
                f"gpu{number}_watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                f"gpu{number}_celsius": float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            }

        return read

    return [reader(number) for number in range(torch.cuda.device_count())]


def _existing(folder: Path) -> Path:
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
