"""May a long run begin? What exists is run on it, each in a process of its own, and told in one table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

UPDATES = 12
"""Of the runs that are killed and resumed, and of those that are compared."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    what: str
    result: str
    "good, note, warning or error."
    evidence: str
    again: str = ""
    "The command that says more."


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command left."""

    code: int
    out: str
    errors: str

    @property
    def last(self) -> str:
        """The last line that it printed; of a failure, the line that says what went wrong."""
        lines = [line.strip() for line in (self.errors if self.code else self.out).splitlines() if line.strip()]
        failed = [line for line in lines if line.startswith("error")]
        return (failed or lines or ["nothing was printed"])[-1]


def checks(target: Sequence[str], tell: Callable[[str], object]) -> Iterator[Check]:
    """Yield what is found of a task and its plan; `target` are the words that name them, as for every verb."""
    for what, verb, told, *options in (("the plan", "plan", planned), ("every stage runs", "fit", smoked, "--smoke")):
        tell(what)
        words = [verb, *target, *options]
        ended = forge(words)
        yield Check(what, result(ended), ended.last if ended.code else told(ended.out), command(words))
        if ended.code:
            return  # nothing else can run
    tell("mistakes that raise no error")
    yield from examined([*("doctor", *target), "--quick"])
    for what, verb, *options in (
        ("a killed run ends in the same bits", "verify-resume", "--kills", "1", "--updates", str(UPDATES)),
        ("two runs are equal", "determinism", "--updates", str(UPDATES)),
    ):
        tell(what)
        words = [verb, *target, *options]
        ended = forge(words)
        yield Check(what, result(ended), ended.last, command(words))


def examined(words: list[str]) -> Iterator[Check]:
    """Yield what the run consists of, and what a quick examination finds."""
    what, ended = "mistakes that raise no error", forge([*words, "--json"])
    try:
        said = json.loads(ended.out)
    except ValueError:
        yield Check(what, "error", ended.last, command(words))
        return
    yield from (Check(about, "good", fact) for about, fact in said["facts"].items())
    loud = [finding for finding in said["findings"] if finding["level"] != "note"]
    for finding in loud:
        yield Check(what, finding["level"], f"{finding['name']}: {finding['message']}", command(words))
    if not loud:
        yield Check(what, "good", f"none found in {said['seconds']:.0f} s", command(words))


def planned(out: str) -> str:
    """Return what the page of a plan says of its stack: the plugins, by name."""
    rows = out.partition("Stack, outermost first")[2].partition("\n\n")[0].splitlines()[2:]
    return ", ".join(row.split()[0] for row in rows if row and not row[0].isspace())


def smoked(out: str) -> str:
    """Return the line of a smoke run that says what ran."""
    return next((line.strip() for line in out.splitlines() if line.strip().startswith("smoke")), "it runs")


def result(ended: Ended) -> str:
    return "error" if ended.code else "good"


def command(words: Sequence[str]) -> str:
    return " ".join(["forge", *words])


def forge(words: Sequence[str]) -> Ended:
    """Run a verb."""
    done = subprocess.run([sys.executable, "-m", "forge", *words], capture_output=True, text=True, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


def as_data(found: Sequence[Check]) -> dict[str, object]:
    """Return the table for programs."""
    return {"may_start": may_start(found), "checks": [asdict(check) for check in found]}


def may_start(found: Sequence[Check]) -> bool:
    return not any(check.result == "error" for check in found)
