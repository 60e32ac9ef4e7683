"""What two processes that made the same updates have, compared: the verdict about a resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forge.snapshot.evidence import CURES, MEANS, UNSAVED, cure
from forge.twin.compare import differences, first_difference
from forge.twin.record import Record
from forge.util.text import few

ENDED = "the run ended first"
"""Why a run was not rehearsed, where only the card says so."""
EXACT = "Resume rehearsed: a second process continued this run bit for bit"


@dataclass(frozen=True, slots=True)
class ResumeVerdict:
    """What is known of resuming a run: `str` is for its card, `text` for its log."""

    state: Literal["rehearsed, exact", "differs", "refused", "not deterministic", "not rehearsed"]
    text: str
    detail: str = ""
    is_good: bool = False
    "Whether there is nothing to warn of."

    def __str__(self) -> str:
        return f"{self.state}: {self.detail}" if self.detail else self.state


def not_rehearsed(why: str) -> ResumeVerdict:
    text = f"Whether this run can be resumed exactly was not rehearsed: {why}. forge verify-resume tells."
    return ResumeVerdict("not rehearsed", text, why, is_good=True)


def judged(own: Record, said: Sequence[dict[str, Any]]) -> ResumeVerdict | None:
    """Compare what a run has with what second processes say, one after the other, that they have.

    None: another one must say whether the resume differs, or every run. What two of them have differently, as a time,
    is no cause.
    """
    last = said[-1]
    if "refused" in last:
        return ResumeVerdict("refused", f"This run cannot be resumed: {last['refused']}", last["refused"])
    if "failed" in last:
        return not_rehearsed(f"the second process failed: {last['failed']}")
    first, last = (Record.of(each["marks"]) for each in (said[0], last))
    noise = list(differences(first.marks, last.marks))
    if any(not each.aside and each.kind != MEANS for each in noise):  # a metric may be a time
        where = str(first_difference(first, last))
        text = (
            f"Two processes that continue this run differ from each other {where}. The task is not deterministic, so "
            "no resume can be exact. forge determinism names the operation."
        )
        return ResumeVerdict("not deterministic", text, where)
    found = first_difference(first, own, noise=noise)
    if found is None:
        return ResumeVerdict("rehearsed, exact", f"{EXACT}.", is_good=True)
    if len(said) == 1:
        return None
    if not found.aside:
        return ResumeVerdict("differs", f"A resumed run differs from this one {found}. {cure(found)}", str(found))
    names = few(found.names)
    text = f"{EXACT}. It did not have {names} as this run has, and did not need it yet. {CURES[UNSAVED]}"
    return ResumeVerdict("rehearsed, exact", text, f"{names} is not restored")
