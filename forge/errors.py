"""The errors forge raises itself. Each message says what is wrong, where, and what to do.

They are all `ValueError`s, so `except ValueError` works; the command line prints a `ForgeError` as one message
without a traceback, because the message is the whole story.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ForgeError(ValueError):
    """Something the user can fix. The message names the fix."""


class StackError(ForgeError):
    """The plugin stack cannot work as it was asked for."""


class TaskError(ForgeError):
    """The TaskModule, its optimizer or its loss is not what training needs."""


class DataError(ForgeError):
    """A loader or a batch is not what training needs."""


class RecipeError(ForgeError):
    """A recipe, an option or a command-line override is wrong."""


class CheckpointError(ForgeError):
    """A checkpoint, or a file that should be one, cannot be written, trusted or used."""


class NonFiniteError(ForgeError):
    """A loss or a gradient is NaN or infinite."""


class DeterminismError(ForgeError):
    """Only deterministic algorithms are allowed, and an operation has none."""


class KernelError(ForgeError):
    """An operator of forge.kernels was given arguments that make no sense together."""


class Interrupted(SystemExit):
    """A signal ended a fit and its state was saved. Left alone it ends the process with exit code 85: resume me."""

    EXIT_CODE = 85
    agreed = False
    "Whether all ranks leave in this way at the same update."

    def __init__(self, message: str):
        super().__init__(self.EXIT_CODE)
        self.message = message

    def __str__(self) -> str:
        return self.message


class PeerFailed(SystemExit):
    """Another rank failed first and has said why. Left alone it ends this process with the same exit code, silently."""

    def __init__(self, rank: int, summary: str, code: int = 1):
        super().__init__(code)
        self.rank, self.summary = rank, summary

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.summary}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the nearest known word, else the list of what there is."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" There is: {', '.join(names)}." if names else ""
