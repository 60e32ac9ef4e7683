"""Ranges of options: `task.lr=log(1e-4,1e-1)`, as they are written on the command line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.errors import RecipeError

if TYPE_CHECKING:
    from optuna.trial import Trial

FORMS = "log(LOW,HIGH), uniform(LOW,HIGH), int(LOW,HIGH[,STEP]), logint(LOW,HIGH) or choice(A,B,...)"
WRITTEN = re.compile(r"(log|uniform|int|logint|choice)\((.*)\)\s*", re.DOTALL)

ParameterValue = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Space:
    """The values that one option may take."""

    key: str
    kind: str
    low: float = 0.0
    high: float = 0.0
    step: int = 1
    texts: tuple[str, ...] = ()
    "The choices, as they were written."

    @property
    def is_log(self) -> bool:
        return self.kind in ("log", "logint")

    @property
    def is_choice(self) -> bool:
        return self.kind == "choice"

    @property
    def values(self) -> list[ParameterValue]:
        """All values of a choice or a range of integers; raise for ranges of real numbers."""
        if self.is_choice:
            return [as_value(text) for text in self.texts]
        if self.kind == "int":
            return list(range(int(self.low), int(self.high) + 1, self.step))
        raise RecipeError(
            f"{self.key}: a grid takes values, and {self} has infinitely many. Write choice(A,B,...), or use another "
            "sampler."
        )

    @property
    def example(self) -> ParameterValue:
        """One of the values."""
        return as_value(self.texts[0]) if self.is_choice else self._number(self.low)

    def suggest(self, trial: Trial) -> ParameterValue:
        """Ask Optuna for a value."""
        if self.is_choice:
            return trial.suggest_categorical(self.key, self.values)
        if self.kind in ("int", "logint"):
            low, high = int(self.low), int(self.high)
            return trial.suggest_int(self.key, low, high, step=self.step, log=self.is_log)
        return trial.suggest_float(self.key, self.low, self.high, log=self.is_log)

    def override(self, value: Any) -> str:
        """Return a value as an override of the command line."""
        if self.is_choice:
            return f"{self.key}={self.texts[self.values.index(value)]}"
        return f"{self.key}={self._number(value)!r}"

    def _number(self, value: float) -> int | float:
        return int(value) if self.kind in ("int", "logint") else float(value)

    def __str__(self) -> str:
        if self.is_choice:
            return f"choice({','.join(self.texts)})"
        ends = f"{self._number(self.low)!r},{self._number(self.high)!r}"
        return f"{self.kind}({ends}{f',{self.step}' if self.step != 1 else ''})"


def is_space(override: str) -> bool:
    """Whether an override gives a range instead of a value."""
    return WRITTEN.fullmatch(override.partition("=")[2]) is not None


def parse_spaces(given: Mapping[str, str] | Iterable[str]) -> list[Space]:
    """Read ranges: `{"task.lr": "log(1e-4,1e-1)"}`, or `["task.lr=log(1e-4,1e-1)"]`."""
    texts = [f"{key}={form}" for key, form in given.items()] if isinstance(given, Mapping) else list(given)
    spaces = [parse_space(text) for text in texts]
    if not spaces:
        raise RecipeError(f"A sweep needs an option to vary, as in 'task.lr=log(1e-4,1e-1)'. Forms: {FORMS}.")
    for one, other in itertools.combinations(spaces, 2):
        if one.key == other.key:
            raise RecipeError(f"{one.key} has two ranges, {one} and {other}; give one.")
    return spaces


def parse_space(text: str) -> Space:
    """Read one range; raise RecipeError naming the forms."""
    key, _, form = text.partition("=")
    found = WRITTEN.fullmatch(form)
    if not key or found is None:
        raise RecipeError(f"{text!r} is no range. Write {key or 'task.lr'}= and one of {FORMS}.")
    kind, arguments = found[1], split(found[2])
    if kind == "choice":
        if len(arguments) < 2 or len({as_value(word) for word in arguments}) < len(arguments):
            raise RecipeError(f"{text}: choice takes two different values or more.")
        return Space(key, kind, texts=tuple(arguments))
    try:
        numbers = [(int if "int" in kind else float)(word) for word in arguments]
    except ValueError:
        whole = "whole numbers" if "int" in kind else "numbers"
        raise RecipeError(f"{text}: {kind} takes {whole}; for words write choice({','.join(arguments)}).") from None
    low, high, step = (*numbers, 1, 0, 0)[:3]
    if not 2 <= len(numbers) <= (3 if kind == "int" else 2) or not low < high or step < 1:
        raise RecipeError(f"{text}: write the lowest and then the highest value, as in {kind}(1,10).")
    if "log" in kind and low <= 0:
        raise RecipeError(f"{text}: a logarithmic range is above 0; it begins at {low:g}.")
    return Space(key, kind, low, high, int(step))


def split(text: str) -> list[str]:
    """Divide arguments at commas that are outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            parts.append("")
            continue
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        depth += (letter in "([{") - (letter in ")]}") if not quote else 0
        parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def as_value(text: str) -> ParameterValue:
    """Return a choice as plain data; what is neither number, truth value nor null is text."""
    named: dict[str, ParameterValue] = {"true": True, "false": False, "null": None}
    if text.lower() in named:
        return named[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def combinations(spaces: Sequence[Space]) -> list[dict[str, ParameterValue]]:
    """Return every combination of values: the grid, the last option varying fastest."""
    keys = [space.key for space in spaces]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(s.values for s in spaces))]
