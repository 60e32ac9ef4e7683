"""The verdict on the speed of a run: what its updates lose most of their time to, and what helps.

Numbers in, words out: whatever measures a run, while it trains or afterwards, says the same of it. Plugins are not
named here; those that help declare it (`cures`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forge import registry
from forge.util.text import format_bytes

LOST = 0.2
"""Share of the time from which a loss is worth a word: without it the run would be a quarter faster."""
CALL = 10e-6
"""What a CPU takes to call an operator, in seconds, before the operator does anything."""
RARE = 1.0
"""Least seconds in all of what happens seldom: the one checkpoint at the end of a short run is no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The average update with its share of all that is done between updates; in seconds where nothing else is said."""

    phases: Mapping[str, float]
    "On the host: data, to_device, forward, backward, optimizer, evaluate, checkpoint, log, wait; none inside another."
    on_cpu: bool = True
    "Whether the host itself computes, and no device of its own."
    busy: float | None = None
    "Kernels of the device; on a CPU operators without the cost of calling them; None if unknown."
    calls: float | None = None
    "Number of operators called, if counted; on a CPU they tell the host's share where `busy` is unknown."
    reads: Mapping[str, float] = field(default_factory=dict)
    "Values that the user's code reads on a CPU, as `.item()` does, by place."
    moved: float = 0.0
    "Bytes copied to the device."
    collate: float | None = None
    "The part of `data` that joins samples into a batch, if known."
    workers: int | None = None
    "Number of the loader's worker processes, if known."
    cores: int = 1
    "Number of cores that the host has."
    syncs: Mapping[str, float] = field(default_factory=dict)
    "Reads of the device's values, for which the host waits, by place."
    ranks: Sequence[float] = ()
    "Each rank's own work, until it waits for the others."
    updates: int = 1
    "Number of updates of which this is the average."
    provides: frozenset[str] = frozenset()
    "What the plugins of the run provide: what they do already is no cure."

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    def of(self, *phases: str) -> float:
        """Return the seconds of some phases together."""
        return sum(self.phases.get(phase, 0.0) for phase in phases)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits a run: data-bound, transfer-bound, host-bound, sync, slow rank, slow validation, slow checkpoint or
    compute-bound; none if nothing stands out."""

    kind: str
    share: float = 0.0
    "Its share of the time."
    cause: str = ""
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.cause} {self.cure}" if self.cause else "nothing stands out"


def verdict(measured: Measured) -> Verdict:
    """Return the largest loss if it is worth a word, else whether it is computing that takes the time."""
    lost, computing = divided(measured)
    seconds = measured.seconds or 1.0
    kind = max(lost, key=lost.__getitem__)
    if lost[kind] < LOST * seconds:
        kind = "compute-bound" if computing is not None and computing >= (1 - LOST) * seconds else "none"
    share = min(1.0, lost.get(kind, computing or 0.0) / seconds)
    if kind == "none":
        return Verdict(kind)
    cause, cure = (words.format(**_details(measured)) for words in WORDS[kind])
    cause = f"{share:.0%} of the time goes into {cause}."
    if kind in lost:
        cause += f" Without that the run would be up to {1 / max(1 - share, 0.01):.1f}× as fast."
    return Verdict(kind, share, cause, " ".join([*_by_plugins(kind, measured), cure]))


def divided(measured: Measured) -> tuple[dict[str, float], float | None]:
    """Return the seconds of an update that are lost, by kind, and those that compute, None if unknown.

    Nothing is lost while a device computes, whatever the host does meanwhile: a device's losses are parts of its idle
    time. On a CPU each operator costs a call, which is a loss only where calling takes longer than computing.
    """
    lost = {"data-bound": measured.of("data"), "transfer-bound": measured.of("to_device")}
    lost["sync"] = sum(measured.syncs.values())
    seldom = {"slow validation": measured.of("evaluate"), "slow checkpoint": measured.of("checkpoint")}
    computing = measured.busy
    if not measured.on_cpu and computing is not None:
        idle = max(0.0, measured.seconds - sum(seldom.values()) - computing)
        lost = {kind: min(seconds, idle) for kind, seconds in lost.items()}
        lost["host-bound"] = max(0.0, idle - sum(lost.values()) - measured.of("wait"))
    elif measured.on_cpu and (computing is not None or measured.calls is not None):
        at_work = max(0.0, measured.of("forward", "backward", "optimizer") - lost["sync"])
        computing = at_work - CALL * (measured.calls or 0.0) if computing is None else computing
        computing = min(max(0.0, computing), at_work)
        lost["host-bound"] = at_work - computing if at_work > 2 * computing else 0.0
    lost |= {kind: seconds for kind, seconds in seldom.items() if seconds * measured.updates >= RARE}
    if len(measured.ranks) > 1:
        lost["slow rank"] = max(measured.ranks) - statistics.median_low(measured.ranks)
    return lost, computing


WORDS = {
    "data-bound": ("waiting for data{most}", "{load}Decode and tokenize once, and store the result."),
    "transfer-bound": ("copies to the device{moved}", "Send less (uint8, no padding), from memory that is pinned."),
    "host-bound": (
        "Python and the calling of operators{reads}",
        "{tensors}A larger batch gives every call more to do.",
    ),
    "sync": ("reads of the device's values, above all in {place}", "Leave .item(), .cpu() and print out of the step."),
    "slow rank": ("waiting for rank {rank}", "Look there for other processes (nvidia-smi, top) and lowered clocks."),
    "slow validation": ("validation", "Validate less often, or on a part of the data."),
    "slow checkpoint": ("checkpoints", "Save less often, in the background, or to a faster disk."),
    "compute-bound": ("computing", "Else a faster device, or more of them."),
}
"""What the time of each kind goes into, and what helps beside what plugins do."""


def _details(measured: Measured) -> dict[str, object]:
    """Return what the words of a kind may name."""
    workers, cores, most = measured.workers, measured.cores, ""
    if measured.collate is not None:
        most = "collate_fn" if 2 * measured.collate > measured.of("data") else "the samples of the dataset"
    more = workers is not None and workers < cores
    reads, read = measured.reads, sum(measured.reads.values())
    often = read > LOST * (measured.calls or 1)
    return {
        "most": most and f", most of it for {most}",
        "load": f"Load in more processes: num_workers={cores if workers else min(4, cores)}. " if more else "",
        "moved": f", {format_bytes(int(measured.moved))} an update" if measured.moved else "",
        "reads": f", with {read:,.0f} values read, above all in {max(reads, key=reads.__getitem__)}" if often else "",
        "tensors": "Leave .item(), .cpu() and print out of the step. " if often else "",
        "place": max(measured.syncs, key=measured.syncs.__getitem__, default=""),
        "rank": measured.ranks.index(max(measured.ranks)) if measured.ranks else 0,
    }


def _by_plugins(kind: str, measured: Measured) -> list[str]:
    """Return what installed plugins do about a kind, those for an idle device first, as a sentence."""
    problems = ["idle"] * (kind == "host-bound" and not measured.on_cpu) + [kind.removesuffix("-bound")]
    found = [cure for problem in problems for cure in registry.cures(problem, beside=[measured])]
    return [f"{'; '.join(found)}."] if found else []
