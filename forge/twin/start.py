"""Run two programs from one state: in this process, in a copy of it, or as commands."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from forge.errors import ForgeError
from forge.rng import RNGState
from forge.twin.compare import Difference, first_difference
from forge.twin.record import Record
from forge.util.apart import Copy

Program = Callable[[Record], Any] | Sequence[str] | Path
"""A function that marks in a record; a command, in which "{record}" stands for the file of its record; or such a
file."""
Start = Literal["here", "fork"]
FILE = "{record}"


def twin(one: Program, other: Program, *, start: Start = "here", tolerance: float = 0.0) -> Difference | None:
    """Run two programs from one state; return where they part, None if they are the same.

    ::

        print(twin(by_hand, by_the_trainer, tolerance=1e-6))
        print(twin(Path("yesterday.jsonl"), ["python", "train.py", "{record}"]))

    A function starts with the random numbers of this moment, which are restored after it; with `start="fork"`, on
    Linux, in a copy of this process that shares nothing with it. A tolerance of 0 asks for the same bits, any other is
    relative: see `first_difference`.
    """
    return first_difference(recorded(one, start), recorded(other, start), tolerance)


def recorded(program: Program, start: Start = "here") -> Record:
    """Run a program, and return its record."""
    if isinstance(program, Path):
        if not program.exists():
            raise ForgeError(f"There is no record {str(program)!r}. Record(path) writes one.")
        return Record.read(program)
    if callable(program):
        return here(program) if start == "here" else forked(program)
    if not any(FILE in word for word in program):
        raise ForgeError(f"A command gets the file of its record by the word {FILE!r}, which {[*program]} has not.")
    with tempfile.TemporaryDirectory(prefix="forge-twin-") as folder:
        path = Path(folder) / "record.jsonl"
        command([word.replace(FILE, str(path)) for word in program])
        return Record.read(path)


def here(program: Callable[[Record], Any]) -> Record:
    """Call a program in this process; the random numbers are as before afterwards."""
    record, device = Record(), torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    state = RNGState.capture(device)
    try:
        program(record)
    finally:
        state.restore(device)
        record.close()
    return record


def forked(program: Callable[[Record], Any]) -> Record:
    """Call a program in a copy of this process, which must not have used an accelerator."""

    def work(parent: Connection) -> None:
        record = Record()
        try:
            program(record)
            parent.send(record.marks)
        except BaseException:
            parent.send(traceback.format_exc())

    copy = Copy(work)
    try:
        said = copy.hear()
    except EOFError:
        said = "it ended without a word"
    finally:
        copy.end()
    if isinstance(said, str):
        raise ForgeError(f"The program failed in a copy of this process:\n{said}")
    return Record.of(said)


def command(words: Sequence[str], environment: Mapping[str, str] | None = None, expected: int = 0) -> None:
    """Run a command in a process of its own; raise on another exit code than expected."""
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if done.returncode != expected:
        output = re.sub("^error: ", "", (done.stderr or done.stdout).strip(), flags=re.MULTILINE)
        raise ForgeError(f"This run ended with exit code {done.returncode}:\n{output}")
