"""Device memory: its parts, the history of allocations, and the report when it runs out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import forge
from forge.util.frames import is_library
from forge.util.text import format_bytes
from forge_plugins.torch_internals import cuda_history_enabled, dump_memory_snapshot, record_memory_history

LAST, WINDOW = 20_000, 100_000
"""How many allocations are remembered: for the case that memory runs out, and of a recorded window."""
REST = "activations and all else"


class History:
    """torch's history of CUDA allocations with their Python lines. One that the user enabled is kept."""

    def __init__(self, device: torch.device):
        self.possible = device.type == "cuda" and not cuda_history_enabled()
        self._on = False

    def keep(self, entries: int) -> None:
        """Record from now on, keeping the last `entries` allocations; 0: stop recording."""
        if not entries:
            self.drop()
        elif self.possible:
            options: dict[str, Any] = {"context": "alloc", "stacks": "python", "max_entries": entries}
            record_memory_history("all", clear_history=True, **options)
            self._on = True

    def drop(self) -> None:
        """Stop recording."""
        if self._on:
            self._on = False
            record_memory_history(None)


def dump(file: Path) -> None:
    """Write torch's snapshot, for https://pytorch.org/memory_viz. It is a pickle: forge never reads it."""
    dump_memory_snapshot(str(file))


# ---------------------------------------------------------------------------------------------------------------------
# Parts of memory


def parts(trainer: forge.Run) -> dict[str, int]:
    """Return bytes by purpose, on the run's device; shared storage counts once."""
    task, device, seen = trainer.task, trainer.env.device, set[int]()

    def bytes_of(tensors: Iterable[Any]) -> int:
        total = 0
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device == device and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                total += 0 if storage.data_ptr() in seen else storage.nbytes()
                seen.add(storage.data_ptr())
        return total

    found = {"parameters": bytes_of(task.parameters()), "buffers": bytes_of(task.buffers())}
    if trainer.verb == "fit":
        found["gradients"] = bytes_of(p.grad for p in task.parameters())
        optimizers = trainer.optimizers.values() if hasattr(trainer, "optimizers") else ()
        states = (state for optimizer in optimizers for state in optimizer.state.values())
        found["optimizer state"] = bytes_of(value for state in states for value in state.values())
    if device.type == "cuda":
        found[REST] = max(0, torch.cuda.memory_allocated(device) - sum(found.values()))
    return found


@dataclass(slots=True)
class MemoryHolder:
    """Memory in use that was allocated by one line of the user's program."""

    where: str
    bytes: int = 0
    blocks: int = 0


def largest(segments: Iterable[Mapping[str, Any]], count: int = 10) -> list[MemoryHolder]:
    """Return the lines that hold the most memory, from torch's snapshot; blocks without a line are separate."""
    held: dict[str, MemoryHolder] = {}
    for block in (block for segment in segments for block in segment["blocks"]):
        if block["state"] != "active_allocated":
            continue
        where = line_of(block.get("frames") or ()) or f"a block of {format_bytes(block['size'])}"
        entry = held.setdefault(where, MemoryHolder(where))
        entry.bytes += block["size"]
        entry.blocks += 1
    return sorted(held.values(), key=lambda entry: -entry.bytes)[:count]


def line_of(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost line of the user's code in a stack, else the innermost of all."""
    known = [frame for frame in frames if frame.get("filename") not in (None, "??")]
    own = [frame for frame in known if not is_library(frame["filename"])]
    for frame in own or known:
        return f"{frame['filename']}:{frame['line']} in {frame['name']}"
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Out of memory


def usage(trainer: forge.Run) -> str:
    """Return the report of memory when it ran out, as text; forge itself says what helps."""
    device, found = trainer.env.device, parts(trainer)
    where = f"update {trainer.progress.update}, epoch {trainer.progress.epoch}"
    lines = [f"Memory of {device} when it ran out ({where}):"]
    lines += [f"  {name:<26}{format_bytes(count):>10}" for name, count in found.items()]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        lines.append(
            f"  {format_bytes(allocated)} in use, {format_bytes(reserved)} held by torch; "
            f"{format_bytes(free)} free of {format_bytes(total)}."
        )
        holders: list[MemoryHolder] = []
        with suppress(Exception):  # it needs memory itself; report the rest without it
            holders = largest(torch.cuda.memory_snapshot(), 6)
        lines += ["The largest parts of it, and the lines that asked for them:"] if holders else []
        lines += [f"  {format_bytes(h.bytes):>10} in {h.blocks} block{'s'[: h.blocks > 1]}: {h.where}" for h in holders]
        wasted = (reserved - allocated) / max(reserved, 1)
        if wasted > 0.2:
            lines.append(f"{wasted:.0%} of what torch holds is in pieces that fit nothing:")
            lines.append("  PYTORCH_ALLOC_CONF=expandable_segments:True in the environment.")
    if trainer.verb == "fit" and 2 * found.get(REST, 0) < sum(found.values()):
        lines.append("Most of it is parameters and what belongs to them: freeze some (-p freeze), or use an optimizer")
        lines.append("  that keeps less (SGD; Adam keeps two values for each parameter).")
    return "\n".join(lines)
