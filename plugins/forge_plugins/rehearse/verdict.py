"""What two processes that made the same updates have, compared: the verdict about a resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forge.snapshot.evidence import HIDDEN, PARTS, Line, difference
from forge.snapshot.fingerprint import differences
from forge.util.text import few

MADE_BY = "made by"
DECIDING = ("batch", "rng", "weights", "optimizer")
"""Parts that the training decides alone; a metric may be a time."""
EXACT = "Resume rehearsed: a second process continued this run bit for bit"
CURE = (
    "Make it a buffer (self.register_buffer), or save it with get_extra_state and set_extra_state; let data and "
    "schedules compute what they need from the index, the epoch or the step."
)
SEARCH = (
    "Nothing that can be looked into explains it: look for state in files, threads, running generators, hooks, or "
    "objects of other packages. Save it with get_extra_state and set_extra_state."
)
VERIFY = "forge verify-resume tells."


@dataclass(frozen=True, slots=True)
class ResumeVerdict:
    """What is known of resuming a run."""

    state: Literal["exact", "differs", "refused", "not deterministic", "not rehearsed"]
    detail: str = ""
    names: tuple[str, ...] = ()
    is_explained: bool = True
    "Whether the names are those of a cause, rather than of its effects."
    who: str = "A resumed run differs from this one"

    @property
    def is_good(self) -> bool:
        """Whether there is nothing to warn of."""
        return self.state == "not rehearsed" or (self.state == "exact" and not self.names)

    def as_text(self) -> str:
        """Say it in a line, with the cure."""
        match self.state:
            case "not rehearsed":
                return f"Whether this run can be resumed exactly was not rehearsed: {self.detail}. {VERIFY}"
            case "refused":
                return f"This run cannot be resumed: {self.detail}"
            case "not deterministic":
                return (
                    f"Two processes that continue this run differ from each other {self.detail}. The task is not "
                    "deterministic, so no resume can be exact. forge determinism names the operation."
                )
            case "differs":
                return f"{self.who} {self.detail}. {CURE if self.is_explained else SEARCH}"
        if self.names:
            return f"{EXACT}. It did not have {few(self.names)} as this run has, and did not need it yet. {CURE}"
        return f"{EXACT}."

    def __str__(self) -> str:
        if self.state == "exact":
            return f"rehearsed, exact{f': {self.detail}' if self.detail else ''}"
        return f"{self.state}: {self.detail}"


def judged(own: Line, played: Sequence[Line]) -> ResumeVerdict:
    """Compare what a run has with what its rehearsals have after the same updates."""
    for name, now, then in differences(played[0][MADE_BY], own[MADE_BY]):  # as threads, set for one process alone
        return ResumeVerdict("not rehearsed", f"the second process had {name} {now}, this one has {then}")
    if len(played) > 1:
        noise = difference(*played)
        if noise is not None and any(played[0][part] != played[1][part] for part in DECIDING):
            return ResumeVerdict("not deterministic", str(noise), noise.names)
        own, first = (without(line, *played) for line in (own, played[0]))
    else:
        first = played[0]
    found = difference(first, own)
    if found is None:
        return ResumeVerdict("exact")
    if not found.shown:
        return ResumeVerdict("exact", f"{few(found.names)} is not restored", found.names)
    return ResumeVerdict("differs", str(found), found.names, found.part == HIDDEN)


def without(line: Line, one: Line, other: Line) -> Line:
    """Return a line without the values that two rehearsals have differently, as a time."""
    kept = {
        part: {name: value for name, value in line[part].items() if one[part].get(name) == other[part].get(name)}
        for part in (*PARTS, HIDDEN)
    }
    return {**line, **kept}
