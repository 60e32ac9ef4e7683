"""Shared parts of the benchmarks' command lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


def some_of(known: Iterable[str], **words: list[str]) -> Callable[[str], list[str]]:
    """Return an argparse type: comma-separated names from `known`, or one of `words`, each short for a list."""
    names = list(known)

    def parse(text: str) -> list[str]:
        if text in words:
            return words[text]
        wanted = [name.strip() for name in text.split(",")]
        for name in wanted:
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join([*names, *words])}")
        return wanted

    return parse
