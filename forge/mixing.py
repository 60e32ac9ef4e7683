"""One number out of several, as a seed: every bit depends on all of them."""

from __future__ import annotations

_MASK = 2**64 - 1


def fold(word: int, value: int) -> int:
    """Fold a value into a 64-bit word so that every bit of both matters (splitmix64)."""
    word = (word + value + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def mix(*parts: int) -> int:
    """One 64-bit number out of several integers, each bit of which depends on all of them."""
    word = 0
    for part in parts:
        word = fold(word, part)
    return word
