"""The report of a recording: as text for the log, as Markdown for TensorBoard and a file, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forge.util.clock import duration
from forge.util.tables import Rows, aligned, piped
from forge.util.text import format_bytes
from forge_plugins.profiler.trace import BETWEEN, EVALUATION, PHASES, UPDATE, Operator, Trace
from forge_plugins.profiler.verdict import Measured, Verdict

LABELS = {
    UPDATE: "rest of the update (gradients, metrics, plugins)",
    BETWEEN: "between updates (logs, checkpoints, plugins)",
    EVALUATION: "evaluation (not counted)",
}
LONGEST = 60
TO_OPEN = "To look at a trace, open its file at https://ui.perfetto.dev: nothing is uploaded."
NO_VERDICT = "No verdict: torch's profiler does not record the device {}."


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one recording."""

    device: str
    first: int
    updates: int
    trace: Trace
    measured: Measured | None
    verdict: Verdict | None
    top: int
    peak: int | None = None
    "Most bytes in use during the recording, if measured."
    files: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        if self.updates == 1:
            return f"recorded update {self.first}"
        return f"recorded updates {self.first} to {self.first + self.updates - 1}"

    # -- as text ------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Return the report for a terminal: verdict, time by phase, and the operators of the verdict."""
        lines = [f"profiler: {self.title} on {self.device}", ""]
        if self.verdict is not None:
            lines += [f"  {self.verdict.kind}", *(f"    {sentence}" for sentence in self.verdict.evidence)]
            lines += ["  what to change", *(f"    {sentence}" for sentence in self.verdict.advice), ""]
        else:
            lines += [f"  {NO_VERDICT.format(self.device)}", ""]
        # by the time that matters for the verdict
        on_device = bool(self.trace.kernels) and (self.verdict is None or self.verdict.kind == "compute-bound")
        operators = self.operators("device" if on_device else "cpu")
        for table in (self.phases(), *self.collectives(), operators):
            lines += [*(f"  {line}" for line in aligned(table)), ""]
        if self.peak is not None:
            lines += [f"  {line}" for line in aligned(self.allocators())]
            lines += [f"  At most {format_bytes(self.peak)} were in use.", ""]
        lines += [f"  {line}" for line in self.files]
        return "\n".join(lines).rstrip()

    def markdown(self) -> str:
        """Return the report as Markdown, with all tables."""
        lines = [f"## {self.title[0].upper()}{self.title[1:]}", "", f"Device: {self.device}.", ""]
        if self.verdict is not None:
            lines += [f"**{self.verdict.kind}**", "", *(f"- {sentence}" for sentence in self.verdict.evidence), ""]
            lines += ["What to change:", "", *(f"- {sentence}" for sentence in self.verdict.advice), ""]
        else:
            lines += [NO_VERDICT.format(self.device), ""]
        for table in self.tables():
            lines += [*piped(table), ""]
        if self.peak is not None:
            lines += [f"At most {format_bytes(self.peak)} were in use.", ""]
        lines += [f"- {line}" for line in self.files]
        lines += ["", TO_OPEN] if self.files else []
        return "\n".join(lines).rstrip() + "\n"

    # -- tables -------------------------------------------------------------------------------------------------------

    def tables(self) -> list[Rows]:
        """Return all tables."""
        tables = [self.phases(), *self.collectives(), self.operators("cpu")]
        if self.trace.kernels:
            tables += [self.operators("device"), self.kernels()]
        return tables if self.peak is None else [*tables, self.allocators()]

    def phases(self) -> Rows:
        """Return the host's time of an update by phase."""
        phases = self.trace.phases
        total = sum(seconds for name, seconds in phases.items() if name != EVALUATION) or 1.0
        rows = [
            (
                LABELS.get(name, name),
                self._each(phases[name]),
                "" if name == EVALUATION else f"{phases[name] / total:.1%}",
            )
            for name in PHASES
            if phases[name] > 0.0005 * total
        ]
        return [("an update, on the host", "time", "share"), *rows]

    def collectives(self) -> list[Rows]:
        """Return a table of the time in collectives by kind; none if there were none."""
        found = self.trace.communication
        if not found.kinds:
            return []
        rows = [
            (each.kind, f"{each.calls / self.updates:.4g}", *self._timed((each.seconds, each.exposed, each.overlapped)))
            for each in ([*found.kinds, found.all] if len(found.kinds) > 1 else found.kinds)
        ]
        columns = ("calls", "time", "share", "exposed", "share", "overlapped", "share")
        return [[("collectives of an update", *columns), *rows]]

    def operators(self, by: str) -> Rows:
        """Return the operators with the most own time, on host or device."""
        found = _top(self.trace.operators, lambda o: o.device if by == "device" else o.cpu, self.top)
        columns, seconds = ["calls", "self CPU", "share"], [lambda o: o.cpu]
        if self.trace.kernels:
            columns += ["self CUDA", "share"]
            seconds += [lambda o: o.device]
        rows = [
            (_short(o.name), f"{o.calls / self.updates:.4g}", *self._timed(second(o) for second in seconds))
            for o in found
        ]
        where = "CUDA" if by == "device" else "CPU"
        return [(f"operators of an update, by self {where} time", *columns), *rows]

    def kernels(self) -> Rows:
        """Return the kernels with the most time on the device."""
        found = _top(self.trace.kernels, lambda kernel: kernel.device, self.top)
        rows = [(_short(k.name), f"{k.calls / self.updates:.4g}", *self._timed([k.device])) for k in found]
        return [("kernels of an update", "runs", "time", "share"), *rows]

    def allocators(self) -> Rows:
        """Return the operators that allocate the most memory."""
        found = _top(self.trace.operators, lambda operator: operator.memory, self.top)
        rows = [(_short(o.name), f"{o.calls / self.updates:.4g}", format_bytes(o.memory / self.updates)) for o in found]
        return [("operators of an update, by memory taken", "calls", "taken"), *rows]

    def _timed(self, seconds: Any) -> list[str]:
        window = self.trace.window or 1.0
        return [text for second in seconds for text in (self._each(second), f"{second / window:.1%}")]

    def _each(self, seconds: float) -> str:
        return duration(seconds / self.updates)

    # -- as data ------------------------------------------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """Return plain data: seconds and counts of an average update."""
        plain: dict[str, Any] = {"device": self.device, "first": self.first, "updates": self.updates}
        if self.verdict is not None and self.measured is not None:
            plain["verdict"] = {
                "kind": self.verdict.kind,
                "shares": {kind.removesuffix("-bound"): share for kind, share in self.measured.shares.items()},
                "evidence": list(self.verdict.evidence),
                "advice": list(self.verdict.advice),
            }
            plain["seconds"] = self.measured.seconds
        plain["seconds_recorded"] = self.trace.window / self.updates
        plain["phases"] = {name: self.trace.phases[name] / self.updates for name in PHASES}
        if self.trace.communication.kinds:
            plain["communication"] = {
                each.kind: {
                    "calls": each.calls / self.updates,
                    **{name: getattr(each, name) / self.updates for name in ("seconds", "exposed", "overlapped")},
                }
                for each in (self.trace.communication.all, *self.trace.communication.kinds)
            }
        plain["operators"] = [self._plain(o) for o in _top(self.trace.operators, lambda o: o.cpu, None)]
        plain["kernels"] = [self._plain(k) for k in _top(self.trace.kernels, lambda k: k.device, None)]
        if self.peak is not None:
            plain["peak_bytes"] = self.peak
        return plain

    def _plain(self, operator: Operator) -> dict[str, Any]:
        plain: dict[str, Any] = {"name": operator.name, "calls": operator.calls / self.updates}
        for name in ("cpu", "device", "memory"):
            if getattr(operator, name):
                plain[name] = getattr(operator, name) / self.updates
        return plain


def _top(found: list[Operator], key: Callable[[Operator], float], count: int | None) -> list[Operator]:
    return sorted((operator for operator in found if key(operator) > 0), key=key, reverse=True)[:count]


def _short(name: str) -> str:
    """Shorten a name; those of kernels can be very long."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
