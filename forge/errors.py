"""Forge's own errors. Each message states what is wrong, where, and what to do.

They are all `ValueError`s, so `except ValueError` works; the command line prints a `ForgeError` as one message without
a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ForgeError(ValueError):
    """An error that the user can fix. The message names the fix."""

    finding: str = ""
    """The name of what was found, where `forge doctor` finds it too (docs/findings.md)."""


class StackError(ForgeError):
    """The requested plugins cannot work together."""


class TaskError(ForgeError):
    """The TaskModule, its optimizer or its loss cannot be trained."""


class DataError(ForgeError):
    """A loader or a batch cannot be used."""


class RecipeError(ForgeError):
    """A recipe, an option or a command-line override is wrong."""


class CheckpointError(ForgeError):
    """A checkpoint cannot be written, verified or used."""


class NonFiniteError(ForgeError):
    """A loss, a gradient, a weight or the state to be saved is NaN or infinite."""


class DeterminismError(ForgeError):
    """An operation has no deterministic algorithm, and only deterministic ones are allowed."""


class NegativeVerdict(ForgeError):
    """A result is worse than was asked for. Uncaught, it ends the command line with exit code 1."""

    EXIT_CODE = 1


class KernelError(ForgeError):
    """An operator of forge.kernels got arguments that do not fit together."""


class Interrupted(SystemExit):
    """A signal ended a fit and its state was saved. Uncaught, it ends the process with exit code 85: to be resumed."""

    EXIT_CODE = 85
    agreed = False
    "Whether all ranks raise it at the same update."

    def __init__(self, message: str):
        super().__init__(self.EXIT_CODE)
        self.message = message

    def __str__(self) -> str:
        return self.message


class PeerFailed(SystemExit):
    """Another rank failed first and printed its error. Uncaught, it ends this process silently with the same code."""

    def __init__(self, rank: int, summary: str, code: int = 1):
        super().__init__(code)
        self.rank, self.summary = rank, summary

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.summary}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the nearest known word, else the list of known words."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" Known: {', '.join(names)}." if names else ""
