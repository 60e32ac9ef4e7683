"""Device memory: its parts, the history of allocations, and the report when it runs out."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

import forge
from forge.util.frames import is_library
from forge.util.tensors import storage_key, tensors_in
from forge.util.text import format_bytes, short_path
from forge_plugins.torch_internals import cuda_history_enabled, dump_memory_snapshot, record_memory_history

ENTRIES = 100_000
"""How many of the latest allocations are remembered."""
REST = "activations and all else"
SNAPSHOT = "Memory snapshot, for https://pytorch.org/memory_viz (a pickle, which forge never reads)"


@contextmanager
def history(device: torch.device) -> Generator[None]:
    """Record CUDA allocations with their Python lines. A history that the user enabled is kept."""
    records = device.type == "cuda" and not cuda_history_enabled()
    if records:
        record_memory_history("all", context="alloc", stacks="python", max_entries=ENTRIES, clear_history=True)
    try:
        yield
    finally:
        if records:
            record_memory_history(None)


# ---------------------------------------------------------------------------------------------------------------------
# Parts of memory


def parts(trainer: forge.Run) -> dict[str, int]:
    """Return bytes by purpose, on the run's device; shared storage counts once."""
    task, device, seen = trainer.task, trainer.env.device, set[int | None]()

    def bytes_of(*values: Any) -> int:
        total = 0
        for tensor in tensors_in(values):
            local = getattr(tensor, "to_local", lambda whole=tensor: whole)()  # a rank's share of a DTensor
            key = storage_key(local)
            if local.device == device and key is not None and key not in seen:
                total += local.untyped_storage().nbytes()
                seen.add(key)
        return total

    optimizers = getattr(trainer, "optimizers", {}).values()
    return {
        "weights": bytes_of(*task.parameters(), *task.buffers()),
        "gradients": bytes_of(*(p.grad for p in task.parameters())),
        "optimizer": bytes_of(*(optimizer.state for optimizer in optimizers)),
    }


def at_peak(found: dict[str, int], events: Iterable[Mapping[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """Return rows for these parts, the rest and all of a recording's peak, from the allocations in its trace.

    A trace counts the host's memory from its own beginning, when weights and the optimizer's state were there already.
    """
    kind = 1 if device.type == "cuda" else 0
    changes = (event["args"] for event in events if event.get("name") == "[memory]")
    totals = [change["Total Allocated"] for change in changes if change["Device Type"] == kind]
    before = 0 if kind else found["weights"] + found["optimizer"]
    peak = max(before + max(totals, default=0), sum(found.values()))
    named = {**found, REST: peak - sum(found.values()), "all": peak}
    return [{"name": name, "bytes": size, "share": size / max(peak, 1)} for name, size in named.items()]


def largest(segments: Iterable[Mapping[str, Any]], count: int = 6) -> dict[str, list[int]]:
    """Return the lines of the user's program that hold the most memory, with the sizes of their blocks, from torch's
    snapshot; blocks without a line are separate."""
    held: dict[str, list[int]] = {}
    for block in (block for segment in segments for block in segment["blocks"]):
        if block["state"] == "active_allocated":
            where = line_of(block.get("frames") or ()) or f"a block of {format_bytes(block['size'])}"
            held.setdefault(where, []).append(block["size"])
    return dict(sorted(held.items(), key=lambda each: -sum(each[1]))[:count])


def line_of(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost line of the user's code in a stack, else the innermost of all."""
    known = [frame for frame in frames if frame.get("filename") not in (None, "??")]
    own = [frame for frame in known if not is_library(frame["filename"])]
    for frame in own or known:
        return f"{frame['filename']}:{frame['line']} in {frame['name']}"
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Out of memory


def explain(trainer: forge.Run, error: BaseException) -> None:
    """Explain an out-of-memory error by a note on it and, on CUDA, a snapshot in the run folder."""
    error.add_note(usage(trainer))  # before anything that may fail
    if trainer.run_dir is None or trainer.env.device.type != "cuda":
        return
    file = trainer.run_dir / "profile" / f"rank{trainer.env.rank}.out-of-memory.pickle"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        dump_memory_snapshot(str(file))
        error.add_note(f"{SNAPSHOT}: {short_path(file)}")
    except Exception as failed:  # a snapshot needs memory itself
        error.add_note(f"No memory snapshot in {file.parent}: {type(failed).__name__}: {failed}")


def usage(trainer: forge.Run) -> str:
    """Return the report of memory when it ran out, as text; forge itself says what helps."""
    device, found = trainer.env.device, parts(trainer)
    lines = [f"Memory of {device} when it ran out (update {trainer.progress.update}, epoch {trainer.progress.epoch}):"]
    if device.type == "cuda":
        found[REST] = max(0, torch.cuda.memory_allocated(device) - sum(found.values()))
    lines += [f"  {name:<26}{format_bytes(count):>10}" for name, count in found.items()]
    if device.type == "cuda":
        with suppress(Exception):  # it needs memory itself; report the rest without it
            held = largest(torch.cuda.memory_snapshot())
            lines += ["The largest parts of it, and the lines that asked for them:"]
            lines += [
                f"{format_bytes(sum(sizes)):>12} in {len(sizes)} blocks: {where}" for where, sizes in held.items()
            ]
    return "\n".join(lines)
