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
from pathlib import Path
from typing import Protocol

import torch

import forge
from forge.snapshot.evidence import HIDDEN, Line, batches, difference, line_of
from forge.snapshot.fingerprint import surroundings
from forge.util.apart import end_with_parent, fork_apart
from forge.util.files import atomic_write
from forge_plugins.rehearse.verdict import DECIDING, MADE_BY, ResumeVerdict, judged

EVIDENCE, ERROR, OUTPUT = "evidence.json", "error.txt", "output.txt"
FOLDER = ".rehearsal"
"""The folder, in the run's, in which the second process works."""

REFUSED = "refused: "
IS_RESUMED = "This run differs from the attempt that it continues"
IDLE = 10.0
"""Seconds without any work after which a copied process is given up."""
SHARE = 50.0
"""Times as long as it took to note what follows a checkpoint, nothing is noted again."""


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
        """Begin with a complete checkpoint, in a thread."""
        self._folder, self._under_way = run_dir / FOLDER, True
        threading.Thread(target=self._begin, args=(checkpoint,), name="forge-rehearsal", daemon=True).start()

    def _begin(self, checkpoint: Path) -> None:
        """Play what follows the checkpoint. A full disk is no reason to fail a run."""
        assert self._folder is not None
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
        "The update of the checkpoint that is rehearsed, once there is one."
        self.watches = True
        "Whether there is something to note in the next updates; true before the first, which may be of a resumed run."
        self._witness: UpdateNotes | None = None
        self._expected: Line | None = None
        self._next = 0.0

    def saved(self, update: int, trainer: forge.Run) -> None:
        """Begin to watch what follows a checkpoint, unless watching would take too much of the run's time."""
        if trainer.env.world == 1 and time.monotonic() >= self._next:
            self._witness, self._expected, self.watches = UpdateNotes(update, self.updates), None, True

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
