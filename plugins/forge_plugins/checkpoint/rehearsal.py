"""Rehearsal: prove that a run can be continued, by continuing it elsewhere.

At the first checkpoint of a run a second process loads it as a resumed run would, and makes the next updates. What the
run itself has after the same updates must be the same. From the command line the second process is a new one; from
Python it is a copy of this process as it was when the fit began, which stands by until then.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

import forge
from forge.env import pick_device
from forge.snapshot.evidence import HIDDEN, PARTS, Line, batches, difference, line_of
from forge.snapshot.fingerprint import differences, surroundings
from forge.util.apart import can_fork, end_with_parent, fork_apart
from forge.util.files import atomic_write
from forge.util.text import few

EVIDENCE, ERROR, OUTPUT = "evidence.json", "error.txt", "output.txt"
FOLDER = ".rehearsal"
"""The folder, in the run's, in which the second process works."""
SWITCH = "FORGE_REHEARSE"
"""The environment variable that switches rehearsals off (off): for programs that make many short runs."""
ENDED, SHORT = "the run ended first", "the run is short"
"""Reasons that only the card gives."""
NOTABLE = 0.02
"""The part of a run's expected time that starting a second process may take."""
REFUSED = "refused: "
IS_RESUMED = "This run differs from the attempt that it continues"
PATIENCE = 2.0
"""Seconds that the end of a run waits for a rehearsal under way."""
IDLE = 10.0
"""Seconds without any work after which a copied process is given up."""
SHARE = 50.0
"""Times as long as it took to note what follows a checkpoint, nothing is noted again."""

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


class UpdateNotes:
    """Notes what a run has, some updates after a checkpoint."""

    def __init__(self, after: int, updates: int):
        self.after, self.updates = after, updates
        self.seen: dict[str, str] = {}

    def note(self, trainer: forge.Run, step: forge.Step) -> Line | None:
        """Note the batches of an update; after the last, return everything."""
        update = trainer.progress.update
        if not self.after < update <= self.after + self.updates:
            return None
        self.seen |= {f"update {update}, {name}": value for name, value in batches(step.window)}
        if update < self.after + self.updates:
            return None
        return line_of(trainer, step) | {"batch": self.seen, MADE_BY: surroundings(trainer)}


class Continuation:
    """What the second process does: continue, note, and end."""

    def __init__(self, folder: Path, updates: int):
        self.folder, self.updates = folder, updates
        self.witness: UpdateNotes | None = None

    def note(self, trainer: forge.Run, step: forge.Step) -> None:
        if self.witness is None:
            self.witness = UpdateNotes(trainer.progress.update - 1, self.updates)
        line = self.witness.note(trainer, step)
        if line is not None:
            (self.folder / EVIDENCE).write_text(json.dumps(line))
            os._exit(0)


class Understudy(Protocol):
    """A process that can continue the run."""

    def play(self, folder: Path, then: Callable[[str], None]) -> None:
        """Begin to continue the run in `folder`; call `then`, in a thread, with what went wrong or ""."""

    def leave(self) -> None:
        """End, whatever is under way."""


class CopiedProcess:
    """The process as it was when the fit began; each rehearsal is played by a copy of this copy."""

    def __init__(self, play: Callable[[Path], None]):
        torch.optim.SGD([torch.zeros(())], lr=0.0)  # imports half of torch: once, before the copy is made
        torch.zeros((), requires_grad=True).backward()  # after a compiler's work this starts threads: no copy then
        here, self._orders = os.pipe()
        self._answers, there = os.pipe()
        self.process = fork_apart((here, there))
        if self.process:
            os.close(here)
            os.close(there)
            return
        status = 1
        try:
            os.close(self._orders)
            os.close(self._answers)
            status = self._stand_by(here, there, play)
        finally:
            os._exit(status)

    def _stand_by(self, orders: int, answers: int, play: Callable[[Path], None]) -> int:
        while order := os.read(orders, 4096):
            process = fork_apart(())  # apart from the next rehearsal too
            if process == 0:
                _perform(play, Path(os.fsdecode(order)))
            _, status = os.waitpid(process, 0)
            os.write(answers, bytes([min(255, abs(os.waitstatus_to_exitcode(status)))]))
        return 0

    def play(self, folder: Path, then: Callable[[str], None]) -> None:
        def wait() -> None:
            with suppress(OSError):
                os.write(self._orders, os.fsencode(folder))
                answer = os.read(self._answers, 1)
                then("" if answer == b"\0" else problem(folder))

        threading.Thread(target=wait, name="forge-rehearsal", daemon=True).start()

    def leave(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process, 9)
        os.waitpid(self.process, 0)
        os.close(self._orders)
        os.close(self._answers)


def _perform(play: Callable[[Path], None], folder: Path) -> None:
    """Play in a process that must never return to the user's program."""
    threading.Thread(target=_leave_if_idle, args=(folder,), daemon=True).start()
    try:
        play(folder)
    finally:
        os._exit(1)  # an understudy that has seen its last update ends there, with 0


def _leave_if_idle(folder: Path) -> None:
    """End a copy that waits in vain: a thread that would answer was not copied."""
    used = -1.0
    while (now := time.process_time()) > used + 0.05:
        used = now
        time.sleep(IDLE)
    (folder / ERROR).write_text("it waits for a thread, which a copy of a process does not have")
    os._exit(1)


class NewProcess:
    """The command that started the run, once more, in a process of its own."""

    def __init__(self, command: Sequence[str]):
        self.command = list(command)
        self.process: subprocess.Popen[bytes] | None = None

    def play(self, folder: Path, then: Callable[[str], None]) -> None:
        def wait() -> None:  # starts it too: it ends with the thread that starts it
            with (folder / OUTPUT).open("w") as output:
                self.process = subprocess.Popen(
                    [*self.command, str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=output,
                    preexec_fn=_modest if sys.platform == "linux" else None,
                    process_group=0,
                )
            then("" if self.process.wait() == 0 else problem(folder))

        threading.Thread(target=wait, name="forge-rehearsal", daemon=True).start()

    def leave(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _modest() -> None:
    os.nice(10)
    end_with_parent()


def problem(folder: Path) -> str:
    """Return the first line that a second process left of its error."""
    for name in (ERROR, OUTPUT):
        with suppress(OSError):
            lines = (folder / name).read_text().strip().splitlines()
            if lines:
                return lines[0].removeprefix("error: ")[:400]
    return "it ended without a word"


# -- the run's side ---------------------------------------------------------------------------------------------------


class Rehearsal:
    """The rehearsal of one fit, seen from the run."""

    def __init__(self, understudy: Understudy):
        self.understudy = understudy
        self.own: Line | None = None
        "What the run has after the updates that are rehearsed."
        self.played: list[Line] = []
        self._folder: Path | None = None
        self._under_way = False
        self._answers: list[str] = []

    def begin(self, checkpoint: Path, run_dir: Path) -> None:
        """Begin with a complete checkpoint; in the thread that wrote it. A full disk is no reason to fail a run."""
        self._folder = run_dir / FOLDER
        target = self._folder / "run" / "checkpoints" / checkpoint.name
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            shutil.copytree(checkpoint, target, copy_function=_link)  # it may be removed from the run meanwhile
        except (OSError, shutil.Error) as error:
            self._answers.append(str(error))
        else:
            self._play()

    def _play(self) -> None:
        assert self._folder is not None
        self._under_way = True
        self.understudy.play(self._folder, self._answers.append)

    def verdict(self, patience: float = 0.0) -> ResumeVerdict | None:
        """Return what the comparison says, once it can; wait for a rehearsal under way so many seconds."""
        until = time.monotonic() + patience
        while not self._answers and self._under_way and self.own is not None and time.monotonic() < until:
            time.sleep(0.005)
        if not self._answers or self.own is None:
            return None
        problem = self._answers.pop()
        self._under_way = False
        if problem.startswith(REFUSED):
            return ResumeVerdict("refused", problem.removeprefix(REFUSED))
        if problem:
            return ResumeVerdict("not rehearsed", f"the second process failed: {problem}")
        assert self._folder is not None
        try:
            self.played.append(json.loads((self._folder / EVIDENCE).read_text()))
        except (OSError, ValueError) as error:
            return ResumeVerdict("not rehearsed", f"the second process left nothing that can be read: {error}")
        if len(self.played) == 1 and difference(self.played[0], self.own) is not None:
            self._play()  # once more: does the resume differ, or does every run?
            return self.verdict(until - time.monotonic())
        return judged(self.own, self.played)

    def end(self) -> None:
        self.understudy.leave()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class Resumes:
    """Keeps what a run has some updates after its checkpoints, and compares an attempt that continues one with it."""

    def __init__(self, updates: int):
        self.updates = updates
        self.rehearsed: int | None = None
        "The update of the checkpoint that is rehearsed."
        self.watches = True
        "Whether there is something to note in the next updates; true before the first, which may be of a resumed run."
        self._witness: UpdateNotes | None = None
        self._expected: Line | None = None
        self._next = 0.0

    def saved(self, trainer: forge.Run) -> None:
        """Begin to watch what follows a checkpoint, unless watching would take too much of the run's time."""
        if trainer.env.world == 1 and time.monotonic() >= self._next:
            self._witness, self._expected, self.watches = UpdateNotes(trainer.progress.update, self.updates), None, True

    def note(self, trainer: forge.Run, step: forge.Step, rehearsal: Rehearsal | None) -> ResumeVerdict | None:
        """Watch an update; tell of an attempt that does not repeat what the one it continues had."""
        assert trainer.run_dir is not None
        folder = trainer.run_dir / "evidence"
        if self._witness is None:
            self._look_back(trainer, folder)
        witness, began = self._witness, time.monotonic()
        line = witness.note(trainer, step) if witness is not None else None
        self.watches = witness is not None and line is None
        if line is None or witness is None:
            return None
        self._witness, expected = None, self._expected
        if rehearsal is not None and self.rehearsed == witness.after:
            rehearsal.own = line
        found = difference(line, expected) if expected is not None else None
        _keep(folder, witness.after, line)
        self._next = time.monotonic() + SHARE * (time.monotonic() - began)
        if found is None or expected is None or all(line[part] == expected[part] for part in DECIDING):
            return None
        return ResumeVerdict("differs", str(found), found.names, found.part == HIDDEN, IS_RESUMED)

    def _look_back(self, trainer: forge.Run, folder: Path) -> None:
        after = trainer.resumed_from
        if after is None or trainer.env.world > 1 or after != trainer.progress.update - 1:
            return
        with suppress(OSError, ValueError, KeyError):
            kept = json.loads((folder / f"update-{after:08d}.json").read_text())
            if kept[MADE_BY] == surroundings(trainer):
                self._witness, self._expected = UpdateNotes(after, self.updates), kept


def _keep(folder: Path, update: int, line: Line) -> None:
    """Write what follows a checkpoint; forget what follows one that is gone. A run does not need it."""
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        for old in folder.glob("update-*.json"):
            if not (folder.parent / "checkpoints" / old.stem).exists():
                old.unlink(missing_ok=True)
        with atomic_write(folder / f"update-{update:08d}.json") as beside:
            beside.write_text(json.dumps(line))


def patience(strict: bool) -> float:
    """Return the seconds that the end of a run waits for a rehearsal under way."""
    return 600.0 if strict else PATIENCE


# -- the verdict ------------------------------------------------------------------------------------------------------


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


def why_not(trainer: forge.Run, asked: bool) -> str | None:
    """Return why a fit that begins is not rehearsed, if so; before anything is built."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return "it runs on several ranks"
    if pick_device(trainer.device).type != "cpu" and not (asked and trainer.again):
        return "a second process would need a second context on the device"
    if trainer.again is None and not can_fork():
        return "a process cannot be copied on this system"
    return None


class FitStart:
    """When a fit began, and what it took to get there."""

    def __init__(self) -> None:
        self.began, self.start_up = time.monotonic(), time.process_time()

    def is_short(self, trainer: forge.Run) -> bool:
        """Whether to start once more would take a notable part of the whole run."""
        if trainer.planned_updates is None:
            return False
        expected = (time.monotonic() - self.began) * trainer.planned_updates / max(1, trainer.progress.update)
        return self.start_up > NOTABLE * expected


def why_not_now(trainer: forge.Run, start: FitStart, asked: bool) -> str | None:
    """Return why a run is not rehearsed from its first checkpoint on, if so."""
    if trainer.env.world > 1:
        return "it runs on several ranks"
    if trainer.again and not asked and start.is_short(trainer):
        return SHORT
    with suppress(OSError, ValueError, KeyError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        if pages * os.sysconf("SC_PAGESIZE") > int(known["MemAvailable"].split()[0]) * 1024:
            return "there is no memory for a second process"
    return None
