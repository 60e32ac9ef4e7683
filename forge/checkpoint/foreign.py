"""Read weights of torch.save and Lightning without running code from the file, and adapt their names."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge.errors import CheckpointError, TaskError
from forge.util.text import few

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
"""Suffixes of files of torch.save."""
HOLDERS = ("state_dict", "model_state_dict", "model", "module", "net", "weights")
"""Keys under which training scripts store a model's weights; Lightning uses the first."""
WRAPPERS = ("_orig_mod.", "module.", "model.")
"""Parts that torch.compile, DDP and Lightning modules add to names, in the order of their removal."""

Rename = Mapping[str | re.Pattern[str], str]
"""A prefix, or a regular expression that begins with ^, to its replacement."""


def read_foreign(file: Path) -> dict[str, Tensor]:
    """Read the weights in a file of torch.save, by name; other content is ignored.

    Only tensors and plain containers are read (`weights_only=True`). A file that needs more is refused, because loading
    it would run code from the file.
    """
    content = _load(file)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not weights by name. {_SAVE_AGAIN}")
    held = [content.get(key) for key in HOLDERS]
    for candidate in (*held, content):
        tensors = _tensors(candidate)
        if tensors:
            return tensors
    keys = ", ".join(map(str, list(content)[:10])) or "nothing"
    raise CheckpointError(
        f"{file} has no weights where forge looks: neither at its top level nor under {', '.join(HOLDERS)}. "
        f"It has {keys}. {_SAVE_AGAIN}"
    )


_SAVE_AGAIN = (
    "Where it was made, save the weights alone: torch.save(model.state_dict(), 'weights.pt'), or as .safetensors."
)


def _load(file: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about how the file was saved
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    except Exception as error:
        if not isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(f"{file} is not a complete file of torch.save, or it is damaged.") from error
        needs = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
        if needs is None:
            raise CheckpointError(f"{file} is not a file of torch.save, or it holds more than weights.") from error
        raise CheckpointError(
            f"{file} holds more than weights: reading it would run {needs[1]}, and forge runs no code from a file. "
            f"{_SAVE_AGAIN}"
        ) from error


def _tensors(value: Any) -> dict[str, Tensor]:
    """Return the tensors of a state dict; empty for any other value."""
    if not isinstance(value, Mapping):
        return {}
    return {name: item for name, item in value.items() if isinstance(name, str) and isinstance(item, Tensor)}


# -- names ------------------------------------------------------------------------------------------------------------


def unwrapped(names: Iterable[str], wanted: Collection[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Map each name to one without wrapper parts, if more wanted names match then; return the removed parts too."""
    now = {name: name for name in names}
    best, off = (now, ()), ()
    for part in WRAPPERS:
        if not any(_without(name, part) != name for name in now.values()):
            continue
        now, off = {old: _without(name, part) for old, name in now.items()}, (*off, part)
        distinct = len(set(now.values())) == len(now)
        if distinct and _hits(now, wanted) > _hits(best[0], wanted):
            best = now, off
    return best


def _without(name: str, part: str) -> str:
    """Remove a wrapper part: that of torch.compile may be inside a name, the others are prefixes."""
    return name.replace(part, "") if part == WRAPPERS[0] else name.removeprefix(part)


def _hits(names: Mapping[str, str], wanted: Collection[str]) -> int:
    return sum(name in wanted for name in names.values())


def renamed(names: Iterable[str], rename: Rename, where: str) -> dict[str, str]:
    """Apply all rules to each name; raise if a rule matches nothing or two names become equal."""
    now = {name: name for name in names}
    for old, new in rename.items():
        is_regex = isinstance(old, re.Pattern) or old.startswith("^")
        text = old.pattern if isinstance(old, re.Pattern) else old
        try:
            rule = re.compile(old if is_regex else "^" + re.escape(text))
            if not any(rule.search(name) for name in now.values()):
                raise TaskError(f"rename: no name in {where} matches {text!r}. It has {few(now.values(), 5)}.")
            replacement = new if is_regex else new.replace("\\", r"\\")
            now = {name: rule.sub(replacement, current, count=1) for name, current in now.items()}
        except (re.error, IndexError) as error:
            raise TaskError(f"rename: {text!r} to {new!r} is not a valid regular expression: {error}.") from error
    origin: dict[str, str] = {}
    for name, new in now.items():
        if new in origin:
            raise TaskError(f"rename: {origin[new]} and {name} of {where} would both become {new}.")
        origin[new] = name
    return now
