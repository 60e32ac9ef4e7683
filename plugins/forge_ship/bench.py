"""Time a trained task's inference in several engines, interleaved, on one device."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from forge import registry
from forge.errors import ForgeError
from forge.report.svg import line_chart
from forge.runs.trained_task import Source
from forge.util import peak_memory
from forge_ship.engine import ExportError
from forge_ship.export import ModuleEngine, Prepared, export, prepare
from forge_ship.export_formats import formats
from forge_ship.interface import Deployed, with_batch
from forge_ship.open_engine import open_file

HERE = ("eager", "compile")
DEFAULT = ("eager", "compile", "pt2", "aoti", "onnx")
WARMUP = 5
LEAST_CALLS, MOST_CALLS = 30, 2000

Infer = Callable[[Mapping[str, Tensor]], Any]


@dataclass
class EngineTiming:
    """The latency of one engine at one batch size, in milliseconds."""

    engine: str
    batch: int
    p50: float
    p95: float
    p99: float
    throughput: float
    "Samples per second."
    calls: int


@dataclass
class BenchResult:
    """The timings of all engines, and what did not run."""

    device: str
    threads: int
    timings: list[EngineTiming] = field(default_factory=list)
    memory: dict[str, int | None] = field(default_factory=dict)
    "Bytes that the process grew by while it loaded and first ran an engine."
    bytes: dict[str, int] = field(default_factory=dict)
    "The size of an engine's file."
    missing: dict[str, str] = field(default_factory=dict)
    "Engines that could not be made, with the reason."

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def fastest(self, batch: int) -> EngineTiming:
        """Return the engine with the lowest median latency at a batch size."""
        return min((t for t in self.timings if t.batch == batch), key=lambda t: t.p50)

    def widest(self) -> EngineTiming:
        """Return the engine and the batch size with the highest throughput."""
        return max(self.timings, key=lambda t: t.throughput)

    def advice(self) -> list[str]:
        """Say which engine to take for latency and which for throughput, against eager where it was timed."""
        least = min(t.batch for t in self.timings)
        quick, wide = self.fastest(least), self.widest()
        return [
            f"For latency take {quick.engine}: {quick.p50:.3g} ms at batch {least}{self._factor(quick)}.",
            f"For throughput take {wide.engine} at batch {wide.batch}: {wide.throughput:,.0f} samples/s"
            f"{self._factor(wide)}.",
        ]

    def _factor(self, timing: EngineTiming) -> str:
        eager = next((t for t in self.timings if (t.engine, t.batch) == ("eager", timing.batch)), None)
        return (
            ""
            if eager is None or timing.engine == "eager"
            else f", {eager.p50 / timing.p50:.2f} times as fast as eager"
        )

    def picture(self, title: str) -> str:
        """Draw latency against batch size, a curve for each engine, as SVG."""
        names = list(dict.fromkeys(t.engine for t in self.timings))
        series = {name: [(float(t.batch), t.p50) for t in self.timings if t.engine == name] for name in names}
        return line_chart(series, title, x_label="batch size", y_label="median latency, ms", log_y=True)


def bench(
    source: Source,
    loader: Any,
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
    _check(engines, batches)
    prepared = prepare(source, loader, device, batches=4)
    result = BenchResult(device, torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        ready: dict[str, Infer] = {}
        largest = _inputs(prepared, max(batches), device)
        for name in engines:
            peak_memory.clean()
            before = peak_memory.peak(torch.device(device)) if device != "cpu" else _resident()
            peak_memory.start(torch.device(device))
            try:
                infer = _engine(name, prepared, Path(folder), result)
                infer(largest)
            except Exception as error:  # one engine that fails is no reason to leave out the others
                reason = (str(error).strip().splitlines() or [""])[0]
                result.missing[name] = reason if isinstance(error, ForgeError) else f"{type(error).__name__}: {reason}"
                continue
            peak = peak_memory.peak(torch.device(device))
            result.memory[name] = None if peak is None or before is None else max(0, peak - before)
            ready[name] = infer
        for rows in batches:
            result.timings += _timed(ready, _inputs(prepared, rows, device), rows, device, seconds)
    if not result.timings:
        raise ExportError("No engine could be made: " + "; ".join(f"{n}: {why}" for n, why in result.missing.items()))
    return result


def _check(engines: Sequence[str], batches: Sequence[int]) -> None:
    known = (*HERE, *filter(_runs, formats()))
    for name in engines:
        if name.partition(":")[0] not in known:
            raise ExportError(
                f"There is no engine {name!r}. Engines: {', '.join(known)}; onnx:int8-static is quantised."
            )
    if not batches or min(batches) < 1:
        raise ExportError("--batch takes sizes of at least 1, as in 1,8,32.")


def _runs(format: str) -> bool:
    """Whether a format has programs; one that cannot be imported says so where it is asked for."""
    try:
        return hasattr(registry.load("format", format), "open_file")
    except ForgeError:
        return True


def _engine(name: str, prepared: Prepared, folder: Path, result: BenchResult) -> Infer:
    module = Deployed(prepared.source.task, prepared.interface).eval()
    if name == "eager":
        return _called(module, prepared)
    if name == "compile":
        return _called(torch.compile(module), prepared)
    format, _, kind = name.partition(":")
    made = export(
        prepared.source.task,
        to=format,
        out=folder / name.replace(":", "-"),
        data=prepared.loader,
        device=prepared.device,
        batches=4,
        quantize=kind or None,
    )
    result.bytes[name] = made.path.stat().st_size
    return open_file(made.path, prepared.device)


def _called(module: Callable[..., Any], prepared: Prepared) -> Infer:
    return ModuleEngine(module, *prepared.ports(), prepared.device)


def _inputs(prepared: Prepared, rows: int, device: str) -> dict[str, Tensor]:
    found = with_batch(prepared.interface.calls[0], prepared.axes, rows)
    return {name: tensor.to(device) for name, tensor in found.items()}


def _timed(
    ready: Mapping[str, Infer], inputs: Mapping[str, Tensor], rows: int, device: str, seconds: float
) -> list[EngineTiming]:
    """Time all engines in turns, so that what the machine does meanwhile meets all of them."""
    rounds: dict[str, int] = {}
    for name, infer in ready.items():
        times = [_once(infer, inputs, device) for _ in range(WARMUP)]
        rounds[name] = int(min(MOST_CALLS, max(LEAST_CALLS, seconds / min(times))))
    taken: dict[str, list[float]] = {name: [] for name in ready}
    turns = 10
    for _ in range(turns):
        for name, infer in ready.items():
            _once(infer, inputs, device)  # its caches come back
            taken[name] += [_once(infer, inputs, device) for _ in range(-(-rounds[name] // turns))]
    return [_summary(name, rows, times) for name, times in taken.items()]


def _once(infer: Infer, inputs: Mapping[str, Tensor], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    infer(inputs)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _summary(name: str, rows: int, times: list[float]) -> EngineTiming:
    ordered = sorted(times)
    p50, p95, p99 = (1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99))
    return EngineTiming(name, rows, p50, p95, p99, rows / mean(times), len(times))


def _resident() -> int | None:
    """Return the bytes of this process that are in memory now."""
    peak_memory.start(torch.device("cpu"))
    return peak_memory.peak(torch.device("cpu"))
