"""Count what torch compiled, where graphs broke, and why it compiled again.

torch keeps these counts in private places that may change: a missing one makes the report shorter, and never fails a
run.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

from forge.torch_internals import dynamo_is_loaded
from forge.util.frames import is_library
from forge.util.text import short_path
from forge_plugins import torch_internals as internals

EXPECTED = re.compile(
    r"requires_grad mismatch|GLOBAL_STATE changed|dispatch key set mismatch|___check_global_state"
    r"|\.training\b|\.__dict__\[['\"]training['\"]\]"
)
"""Guards that fail in normal operation: evaluation, a frozen or thawed parameter, a first block."""
LIMIT = re.compile(r"recompile.?limit", re.IGNORECASE)
GUARD = re.compile(r"(?P<what>.+?) # (?P<code>.+) # (?P<place>\S+:\d+) in \S+")
"""A guard of a graph, the code that it comes from, and its place."""
HINT = re.compile(r"\s*\(HINT:.*", re.DOTALL)
"""A hint that torch adds to some guards; forge has its own advice."""
RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")
SIZE = re.compile(
    r"tensor '(?P<what>.+?)' size mismatch at index (?P<axis>\d+)\. expected (?P<first>\d+), actual (?P<now>\d+)"
)


@dataclass(frozen=True, slots=True)
class Recompile:
    """A function that was compiled again, because a guard failed."""

    function: str
    condition: str
    "The guard that failed, or what was found instead."
    reason: str
    "The condition as text, with place and line of code if torch gives them."

    @classmethod
    def read(cls, function: str, text: str) -> Recompile:
        """Parse torch's reason, without the number of the compared graph."""
        text = HINT.sub("", re.sub(r"^\d+/\d+: ", "", text.strip()))
        text = " ".join(text.split("\n")[0].split())
        guard = GUARD.fullmatch(text)
        if guard is None:
            return cls(function, text.partition(" # ")[0], _cut(text))
        return cls(function, guard["what"], _cut(f"no longer {guard['what']}, at {guard['place']}: {guard['code']}"))

    @property
    def expected(self) -> bool:
        return EXPECTED.search(self.condition) is not None

    @property
    def short_batch(self) -> tuple[int, int] | None:
        """(samples, expected samples) for a smaller batch, such as the last of an epoch; else None."""
        size = SIZE.search(self.condition)
        if size is None or size["axis"] != "0" or int(size["now"]) >= int(size["first"]):
            return None
        return int(size["now"]), int(size["first"])

    @property
    def about_shapes(self) -> bool:
        return "size mismatch" in self.condition or "stride mismatch" in self.condition


@dataclass(slots=True)
class CompileWatch:
    """Counts from its creation; `look` updates the counts."""

    graphs: int | None = 0
    "Graphs compiled; None if torch does not report them."
    ops: int = 0
    "Operations in all of them."
    seconds: float = 0.0
    "Seconds of compilation, as far as torch reports them."
    breaks: dict[str, str] = field(default_factory=dict)
    "Graph breaks: file:line, and the reason."
    recompiles: list[Recompile] = field(default_factory=list)
    "Unexpected recompiles."
    limits: list[Recompile] = field(default_factory=list)
    "Functions that reached torch's limit: new inputs run uncompiled."
    _names: dict[str, str] = field(default_factory=dict)
    _seen: Any = None
    _breaks_seen: int = 0
    _counted: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.skip()

    def skip(self) -> None:
        """Ignore what was compiled since the last look."""
        self._counted = _counters()
        self._breaks_seen = len(_break_reasons())
        self._seen = next(iter(reversed(_frames())), None)

    def look(self) -> None:
        """Count compilations and failures since the last look."""
        self._count()
        reasons = _break_reasons()
        new = reasons[self._breaks_seen :] if len(reasons) >= self._breaks_seen else reasons  # or torch was reset
        self._breaks_seen = len(reasons)
        for reason in new:
            self.breaks.setdefault(place(reason.user_stack), because(reason.reason))
        for frame in self._new_frames():
            self.seconds += (getattr(frame, "duration_us", None) or 0) / 1e6
            if getattr(frame, "is_forward", True) is not False:
                self._name(frame)
                self._read(frame)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Graphs, breaks, recompiles."""
        return self.graphs or 0, len(self.breaks), len(self.recompiles)

    def _count(self) -> None:
        now, last = _counters(), self._counted
        self._counted = now
        if now is None or last is None or self.graphs is None:
            self.graphs = None
            return
        since = last if now[0] >= last[0] else (0, 0)  # or the counters were cleared
        self.graphs, self.ops = self.graphs + now[0] - since[0], self.ops + now[1] - since[1]

    def _new_frames(self) -> list[Any]:
        new: list[Any] = []
        for frame in reversed(_frames()):
            if frame is self._seen:
                break
            new.append(frame)
        self._seen = new[0] if new else self._seen
        return new[::-1]

    def _read(self, frame: Any) -> None:
        reason, failure = getattr(frame, "recompile_reason", None), getattr(frame, "fail_reason", None)
        again = Recompile.read(self._name(frame), reason) if reason else None
        if failure and again is not None and LIMIT.search(f"{getattr(frame, 'fail_type', '')} {failure}"):
            self.limits.append(again)
        elif failure:
            file, line = getattr(frame, "fail_user_frame_filename", None), getattr(frame, "fail_user_frame_lineno", 0)
            self.breaks.setdefault(f"{short_path(file)}:{line}" if file else "an unknown place", because(failure))
        elif again is not None and not again.expected:
            self.recompiles.append(again)

    def _name(self, frame: Any) -> str:
        """Return the function's name; a failed frame has none, but earlier frames of the function had."""
        number = str(getattr(frame, "compile_id", "")).partition("/")[0]
        name = getattr(frame, "co_name", None)
        if name:
            resumed = RESUMED.fullmatch(name)
            self._names[number] = f"{resumed[1]} (from line {resumed[2]})" if resumed else name
        return self._names.get(number, "a function")


# ---------------------------------------------------------------------------------------------------------------------
# torch's records


def graphs_so_far() -> int | None:
    """Return the number of graphs compiled by this process."""
    counted = _counters()
    return None if counted is None else counted[0]


def _counters() -> tuple[int, int] | None:
    """Graphs, and operations in them."""
    if not dynamo_is_loaded():
        return 0, 0
    try:
        stats = internals.compile_counters["stats"]
        return int(stats["unique_graphs"]), int(stats["calls_captured"])
    except (KeyError, TypeError):
        return None


def _break_reasons() -> list[Any]:
    reasons = internals.graph_break_reasons if dynamo_is_loaded() else []
    return [reason for reason in reasons if hasattr(reason, "user_stack") and hasattr(reason, "reason")]


def _frames() -> list[Any]:
    """Return the latest frames that torch compiled or tried to, forward and backward."""
    return list(internals.compilation_metrics()) if dynamo_is_loaded() else []


def why_disabled() -> str | None:
    """Return why torch compiles nothing, if it is switched off."""
    if os.environ.get("TORCHDYNAMO_DISABLE", "0") not in ("", "0"):
        return "TORCHDYNAMO_DISABLE is set: unset it."
    stance = str(internals.compiler_stance.stance)
    return None if stance == "default" else f'torch.compiler.set_stance("{stance}") is active: remove it.'


# ---------------------------------------------------------------------------------------------------------------------
# Text


def place(stack: Any) -> str:
    """Return the innermost line of the user's code, else the innermost of all."""
    frames = list(stack or ())
    own = [frame for frame in frames if not is_library(frame.filename)]
    frame = next(reversed(own or frames), None)
    return "an unknown place" if frame is None else f"{short_path(frame.filename)}:{frame.lineno}"


def because(reason: str) -> str:
    """Return torch's reason as one line: its explanation if it gives one."""
    lines = [line.strip() for line in reason.strip().splitlines()]
    explained = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), None)
    return _cut(explained or (lines[0] if lines else "of an unknown reason"))


def _cut(text: str, length: int = 240) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
