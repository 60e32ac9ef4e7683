"""The logged table of choices: every call with its times, and its kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forge_kernels.call_pattern import RecordedCall
from forge_kernels.selection import AS_WRITTEN, KernelChoice

HEAD = ("call", "times", "as written", "kernel", "used")


def table(
    choices: Sequence[KernelChoice], counts: Mapping[RecordedCall, int], measured: int, compiled: bool, device: str
) -> str:
    """Return the decision table, one line per call."""
    against = "torch.compile" if compiled else "what they replace"
    known = len(choices) - measured
    source = "measured now" if not known else f"{known} of {len(choices)} known from an earlier run"
    if not measured:
        source = "known from an earlier run"
    rows = [HEAD, *(_row(choice, counts.get(choice.call.kind, 0)) for choice in choices)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n  ".join([f"kernels against {against} on {device}, forward and backward, {source}:", *lines])


def _row(choice: KernelChoice, count: int) -> tuple[str, str, str, str, str]:
    kernels = [f"{name} {ms:.4g} ms" for name, ms in choice.ms.items() if name != AS_WRITTEN]
    written = f"{choice.ms[AS_WRITTEN]:.4g} ms" if AS_WRITTEN in choice.ms else "-"
    tried = ", ".join(kernels) or choice.why or "-"
    return str(choice.call), str(count), written, tried, choice.kernel or "as written"
