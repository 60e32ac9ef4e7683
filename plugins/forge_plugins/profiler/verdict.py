"""The verdict: the bottleneck of an update, with evidence and advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import forge
from forge.util.clock import duration
from forge_plugins.profiler.trace import BETWEEN, EVALUATION, STEP, Trace

Kind = Literal["data-bound", "transfer-bound", "communication-bound", "host-bound", "compute-bound"]

BUSY = 0.85
"""Share of busy time from which the device is the bottleneck."""
EXPOSED = 0.1
"""Share of exposed communication from which there is advice about it, whatever the bottleneck is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The average recorded update, in seconds."""

    device: Literal["cpu", "cuda"]
    wall: float
    "From the request of its data to the request of the next."
    busy: float
    "Computing: on cuda kernels; on the cpu operators, without the overhead of each call."
    data: float = 0.0
    "Waiting for the loader; on cuda only while the device was idle."
    copying: float = 0.0
    "cuda: copies from or to the host, without a concurrent kernel."
    communicating: float = 0.0
    "Collectives without concurrent computation."
    collectives: float = 0.0
    "Collectives, with computation at the same time or without."
    unrecorded: float | None = None
    "Seconds of an unrecorded update; recording costs the host time."
    calls: float = 0.0
    "Operators called, or kernels launched."
    waits: float = 0.0
    "cuda: number of times that the host waited for the device."
    waiting_in: str = ""
    "cuda: the most frequent operator that made it wait."
    between: float = 0.0
    "On the host, between two updates: logs, checkpoints, plugins."
    step: float = 0.0
    "On the host, in the optimizer's step."
    absent: float = 0.0
    "cpu: time without a processor, except waiting for data."
    pageable: float = 0.0
    "cuda: the share of bytes copied from unpinned memory."

    @property
    def host(self) -> float:
        """The rest: the host prepares work."""
        return max(0.0, self.wall - self.busy - self.copying - self.communicating - self.data)

    @property
    def surplus(self) -> float:
        """The cost of recording, which falls on the host."""
        if not self.unrecorded:
            return 0.0
        return min(self.host, max(0.0, self.wall - self.unrecorded))

    @property
    def seconds(self) -> float:
        """An update without the cost of recording."""
        return self.wall - self.surplus

    @property
    def shares(self) -> dict[Kind, float]:
        """The shares of an update's time; together 1."""
        parts: dict[Kind, float] = {
            "data-bound": self.data,
            "transfer-bound": self.copying,
            "communication-bound": self.communicating,
            "host-bound": self.host - self.surplus,
            "compute-bound": self.busy,
        }
        total = sum(parts.values()) or 1.0
        return {kind: part / total for kind, part in parts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings of the run, to avoid advice that is followed already."""

    provided: frozenset[str] = frozenset()
    "What the plugins provide."
    workers: int | None = None
    "Worker processes of the loader; None if unknown."
    fused: bool = False
    "Whether every optimizer updates in one kernel."
    convolutions: bool = False
    full_float32: bool = False
    "cuda: whether float32 matrix products use full precision."
    threads: int = 1
    cores: int = 1
    strategy: str = ""
    "The name of the plugin that joins the ranks."
    options: Mapping[str, Any] = field(default_factory=dict)
    "Its options."


def provided(plugins: Iterable[forge.Plugin]) -> frozenset[str]:
    """Return the capabilities of plugins; a plugin without `provides` counts by its name."""
    return frozenset(thing for plugin in plugins for thing in plugin.provides or (plugin.name.partition("@")[0],))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The bottleneck of an update."""

    kind: Kind
    share: float
    "Its share of the time."
    evidence: tuple[str, ...]
    advice: tuple[str, ...]


def measured(
    trace: Trace,
    device: Literal["cpu", "cuda"],
    updates: int,
    unrecorded: float | None = None,
    ran: float | None = None,
) -> Measured:
    """Return the average update of a trace. `ran`: CPU seconds of the thread in the window."""
    on_cuda = device == "cuda"
    window = trace.window / updates
    data = (trace.starved if on_cuda else trace.phases["data"]) / updates
    communicating = trace.communicating / updates
    most = trace.waits.most_common(1)
    absent = 0.0
    if ran is not None and not on_cuda and not trace.phases[EVALUATION]:
        absent = max(0.0, window - data - ran / updates)
    return Measured(
        device=device,
        wall=window,
        busy=trace.busy / updates if on_cuda else min(trace.work / updates, max(0.0, window - data - communicating)),
        data=data,
        copying=trace.copying / updates,
        communicating=communicating,
        collectives=trace.communication.all.seconds / updates,
        unrecorded=unrecorded,
        calls=(sum(kernel.calls for kernel in trace.kernels) if on_cuda else trace.calls) / updates,
        waits=sum(trace.waits.values()) / updates,
        waiting_in=most[0][0] if most else "",
        between=trace.phases[BETWEEN] / updates,
        step=trace.phases[STEP] / updates,
        absent=absent,
        pageable=trace.pageable / trace.copied if trace.copied else 0.0,
    )


def judge(measured: Measured, setup: Setup) -> Verdict:
    """Return the verdict. On cuda: compute-bound if the device is nearly always busy, else bound by the main reason of
    its idle time. On the cpu, with one worker: bound by what takes the most time."""
    shares = measured.shares
    kind: Kind = max(shares, key=lambda kind: shares[kind])
    if measured.device == "cuda":
        idle: list[Kind] = ["data-bound", "transfer-bound", "communication-bound", "host-bound"]
        is_busy = shares["compute-bound"] >= BUSY
        kind = "compute-bound" if is_busy else max(idle, key=lambda kind: shares[kind])
    advice = ADVICE[kind](measured, setup)[:MOST]
    if kind != "communication-bound" and shares["communication-bound"] >= EXPOSED:
        advice = [*advice[: MOST - 1], _for_communication(measured, setup)[0]]
    return Verdict(kind, shares[kind], evidence(measured, kind), tuple(advice))


# ---------------------------------------------------------------------------------------------------------------------
# Evidence


def evidence(measured: Measured, kind: Kind) -> tuple[str, ...]:
    """Return the numbers behind a verdict, most important first."""
    share = measured.shares
    recorded = f" ({duration(measured.wall)} while it is recorded)" if measured.surplus > 0.02 * measured.wall else ""
    sentences = [_where(measured, kind, share), f"An update takes {duration(measured.seconds)}{recorded}."]
    if measured.calls:
        each = measured.busy / measured.calls * 1e6
        what = "kernels are launched" if measured.device == "cuda" else "operators are called"
        sentences.append(f"{measured.calls:,.0f} {what} in an update, with {each:,.0f} µs of work each on average.")
    if measured.absent > 0.15 * measured.wall:
        absent = measured.absent / measured.wall
        sentences.append(
            f"For {absent:.0%} of the time the system ran something else: all these numbers are uncertain."
        )
    if measured.collectives:
        total, exposed = (each / measured.wall for each in (measured.collectives, measured.communicating))
        sentences.append(
            f"Collectives run for {total:.0%} of the recorded time: {exposed:.0%} exposed, with nothing computed "
            f"meanwhile, and {max(0.0, total - exposed):.0%} overlapped."
        )
    if kind == "transfer-bound" and measured.pageable > 0.01:
        sentences.append(f"{measured.pageable:.0%} of the bytes are copied from memory that is not pinned.")
    if measured.waits >= 0.5:
        culprit = f", most often in {measured.waiting_in}" if measured.waiting_in else ""
        sentences.append(f"The host waits for the device {measured.waits:.1f} times an update{culprit}.")
    if kind != "compute-bound":
        sentences.append(f"Without it an update would be {1 / max(1 - share[kind], 0.01):.1f}× as fast at most.")
    return tuple(sentences)


def _where(measured: Measured, kind: Kind, share: Mapping[Kind, float]) -> str:
    busy = f"{share['compute-bound']:.0%}"
    if measured.device == "cuda":
        idle = {
            "data-bound": f"for {share['data-bound']:.0%} it has nothing to do because the host waits for data",
            "transfer-bound": f"for {share['transfer-bound']:.0%} it only copies from or to the host",
            "communication-bound": f"for {share['communication-bound']:.0%} it only waits in collectives",
            "host-bound": f"for {share['host-bound']:.0%} it has nothing to do because the host is not fast enough",
        }
        rest = idle.get(kind)
        return f"The device computes for {busy} of the time{f'; {rest}' if rest else ''}."
    parts = {
        "data-bound": f"{share['data-bound']:.0%} into waiting for data",
        "compute-bound": f"{busy} into the work of operators",
        "host-bound": f"{share['host-bound']:.0%} into Python and the calling of operators",
    }
    if measured.collectives:
        parts["communication-bound"] = f"{share['communication-bound']:.0%} into waiting in collectives"
    first = parts.pop(kind)
    return f"Of an update's time {first.replace(' into', ' goes into')}, {', '.join(parts.values())}."


# ---------------------------------------------------------------------------------------------------------------------
# Advice


WORKERS = 4
"""Workers for a loader without any, where there are as many cores."""
MOST = 4
"""Lines of advice."""
FUSED = "fused=True on the optimizer (Adam, AdamW, SGD): one call updates all parameters."


def _for_data(measured: Measured, setup: Setup) -> list[str]:
    advice: list[str] = []
    if setup.workers == 0:
        number = max(1, min(WORKERS, setup.cores))
        advice.append(f"Load in other processes: num_workers={number} on the loader, which has none.")
    elif setup.workers and setup.workers < setup.cores:
        advice.append(f"Give the loader more than its {setup.workers} workers, up to the cores: {setup.cores}.")
    elif setup.workers and setup.workers > setup.cores:
        advice.append(
            f"Give the loader no more workers than there are cores: {setup.cores}, and it has {setup.workers}."
        )
    advice.append("Data that fit into memory need no loading: forge.data.TensorLoader(inputs, labels, batch_size=...).")
    advice.append("Decode, resize and tokenize once and store the result; transform whole batches, not samples.")
    return advice


def _for_transfer(measured: Measured, setup: Setup) -> list[str]:
    advice: list[str] = []
    if "prefetch" not in setup.provided:
        advice.append("-p prefetch copies the next batches from pinned memory while the device computes.")
    elif measured.pageable > 0.5:
        advice.append("Something else is copied than batches: make tensors on the device (device=) in the first place.")
    if measured.pageable > 0.5 and "prefetch" not in setup.provided:
        advice.append("Or pin_memory=True on the loader: copies from pageable memory keep the host waiting.")
    advice.append("Send less: bytes rather than floats (uint8, made float on the device), no padding.")
    advice.append('Data that fit onto the device are copied once: forge.data.TensorLoader(..., device="cuda").')
    return advice


def _for_communication(measured: Measured, setup: Setup) -> list[str]:
    name, options, advice = setup.strategy, setup.options, []
    if "accumulation" not in setup.provided and "bucket_mb" in options and options.get("stage") != 2:
        advice.append("-p accumulate exchanges gradients once per window of micro-batches.")
    if "compress" in options and options["compress"] is None and options.get("stage") != 2:
        advice.append(f"{name}.compress=bf16 sends gradients in half the bytes, with rounded sums.")
    if "mixed_precision" in options and options["mixed_precision"] is None:
        advice.append(f"{name}.mixed_precision=bf16 gathers parameters in half the bytes.")
    if options.get("reshard"):
        advice.append(f"{name}.reshard=false gathers parameters once per micro-batch, where memory allows.")
    if options.get("replicate") == 1:
        advice.append(f"{name}.replicate=HOSTS keeps shards inside hosts; between them only gradients are averaged.")
    if "microbatches" in options:
        advice.append(f"More than {name}.microbatches={options['microbatches']} leave stages less time to wait.")
    if "bucket_mb" in options:
        advice.append(
            f"{name}.bucket_mb: smaller buckets leave earlier in the backward pass, larger ones are fewer messages."
        )
    advice.append("-p throughput names a rank that the others wait for: waiting for it counts as communication.")
    return advice


def _for_host(measured: Measured, setup: Setup) -> list[str]:
    advice: list[str] = []
    if measured.waits >= 0.5:
        advice.append("Leave .item(), .cpu() and print of tensors out of the step; return metrics as tensors.")
    if measured.between > 0.2 * measured.wall:
        spent = measured.between / measured.wall
        advice.append(f"{spent:.0%} of the time is between updates: -p ledger says what each plugin costs there.")
    if "compile" not in setup.provided:
        how = " compile.mode=reduce-overhead (CUDA graphs)" if measured.device == "cuda" else ""
        advice.append(f"-p compile{how} makes few calls of many.")
    advice.append("A larger batch gives every call more to do, at hardly more cost.")
    if not setup.fused:
        advice.append(FUSED)
    return advice


def _for_compute(measured: Measured, setup: Setup) -> list[str]:
    advice: list[str] = []
    if measured.device == "cpu" and setup.threads < setup.cores:
        advice.append(f"torch computes with {setup.threads} of {setup.cores} cores: torch.set_num_threads(n).")
    if "autocast" not in setup.provided:
        where = ", on tensor cores" if measured.device == "cuda" else ", where the processor is made for it"
        advice.append(f"-p amp: matrix products in bfloat16{where}.")
    if setup.full_float32 and "autocast" not in setup.provided:
        advice.append('torch.set_float32_matmul_precision("high"): float32 matrix products in TF32.')
    if "compile" not in setup.provided:
        advice.append("-p compile fuses what lies between matrix products and convolutions.")
    if not setup.fused and measured.step > 0.15 * measured.wall:
        advice.append(FUSED)
    if setup.convolutions and measured.device == "cuda":
        advice.append("Convolutions like model.to(memory_format=torch.channels_last), above all with -p amp.")
    if measured.device == "cpu":
        advice.append("Or a GPU.")
    elif len(advice) < 2:
        advice.append("The device is at work: -p throughput says how near it is to its peak; then more devices.")
    return advice


ADVICE: dict[Kind, Callable[[Measured, Setup], list[str]]] = {
    "data-bound": _for_data,
    "transfer-bound": _for_transfer,
    "communication-bound": _for_communication,
    "host-bound": _for_host,
    "compute-bound": _for_compute,
}
