"""Time a trained task's inference in several engines, interleaved, on one device."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from forge import registry
from forge.errors import ForgeError
from forge.runs.trained_task import Source
from forge_ship.engine import Engine, ExportError
from forge_ship.export import Prepared, export, prepare
from forge_ship.interface import Deployed, with_batch
from forge_ship.open_engine import ModuleEngine, open_file

DEFAULT = ("eager", "compile", "pt2", "aoti", "onnx")
WARMUP, TURNS = 5, 10
LEAST_CALLS, MOST_CALLS = 30, 2000


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """The latency of one engine at one batch size, in milliseconds."""

    engine: str
    batch: int
    p50: float
    p95: float
    p99: float
    throughput: float
    "Samples per second."


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The timings of all engines, and what did not run."""

    device: str
    threads: int
    timings: list[EngineTiming] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    "Engines that could not be made, with the reason."


def bench(
    source: Source,
    loader: object,
    *,
    engines: Sequence[str] = DEFAULT,
    batches: Sequence[int] = (1, 8, 32),
    device: str = "cpu",
    seconds: float = 1.0,
) -> BenchResult:
    """Time engines on a task's own validation data.

    An engine is "eager", "compile", or a format of `forge export`, alone or quantised as in "onnx:int8-static". Each
    is warmed up at each batch size; then all take turns, for about `seconds` per engine and batch size.
    """
    if not batches or min(batches) < 1:
        raise ExportError("--batch takes sizes of at least 1, as in 1,8,32.")
    known = ("eager", "compile", *registry.installed("format"))
    for name in engines:
        if name.partition(":")[0] not in known:
            raise ExportError(
                f"There is no engine {name!r}. Engines: {', '.join(known)}; onnx:int8-static is quantised."
            )
    prepared = prepare(source, loader, device, batches=4)
    inputs = {rows: with_batch(prepared.interface.calls[0], prepared.axes, rows) for rows in batches}
    moved = {rows: {name: each.to(device) for name, each in given.items()} for rows, given in inputs.items()}
    result = BenchResult(device, torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        ready: dict[str, Engine] = {}
        for name in engines:
            try:
                ready[name] = _engine(name, prepared, Path(folder))
                ready[name](moved[max(batches)])
            except Exception as error:  # one engine that fails is no reason to leave out the others
                ready.pop(name, None)
                reason = (str(error).strip().splitlines() or [""])[0]
                result.missing[name] = reason if isinstance(error, ForgeError) else f"{type(error).__name__}: {reason}"
        for rows, given in moved.items():
            result.timings.extend(_timed(ready, given, rows, device, seconds))
    if not result.timings:
        raise ExportError("No engine could be made: " + "; ".join(f"{n}: {why}" for n, why in result.missing.items()))
    return result


def _engine(name: str, prepared: Prepared, folder: Path) -> Engine:
    if name in ("eager", "compile"):
        module = Deployed(prepared.source.task, prepared.interface).eval()
        module = torch.compile(module) if name == "compile" else module
        return ModuleEngine(module, *prepared.ports(), prepared.device)
    format, _, kind = name.partition(":")
    given = {"data": prepared.loader, "device": prepared.device, "batches": 4, "quantize": kind or None}
    made = export(prepared.source.task, to=format, out=folder / name.replace(":", "-"), **given)
    return open_file(made.path, prepared.device)


def _timed(
    ready: Mapping[str, Engine], inputs: Mapping[str, Tensor], rows: int, device: str, seconds: float
) -> list[EngineTiming]:
    """Time all engines in turns, so that what the machine does meanwhile meets all of them."""
    taken: dict[str, list[float]] = {name: [] for name in ready}
    fastest = {name: min(_once(infer, inputs, device) for _ in range(WARMUP)) for name, infer in ready.items()}
    for _ in range(TURNS):
        for name, infer in ready.items():
            _once(infer, inputs, device)  # its caches come back
            calls = min(MOST_CALLS, max(LEAST_CALLS, seconds / fastest[name]))
            taken[name] += [_once(infer, inputs, device) for _ in range(-(-int(calls) // TURNS))]
    return [_summary(name, rows, sorted(times)) for name, times in taken.items()]


def _once(infer: Engine, inputs: Mapping[str, Tensor], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    infer(inputs)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _summary(name: str, rows: int, ordered: list[float]) -> EngineTiming:
    p50, p95, p99 = (1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99))
    return EngineTiming(name, rows, p50, p95, p99, rows / mean(ordered))
