"""Source files of libraries, which no message about the user's code should name."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec

from forge import registry


@functools.cache
def folder_of(package: str) -> str:
    """Return the folder of a top-level package, with a separator at its end; the package is not imported."""
    spec = find_spec(package)
    origin = spec.origin if spec is not None else None
    return os.path.dirname(os.path.abspath(origin)) + os.sep if origin else f"<{package} is not installed>"


@functools.cache
def libraries() -> tuple[str, ...]:
    """Return the packages that no message about the user's code should name: torch, pluggy, forge and its packages."""
    return ("torch", "pluggy", *sorted(registry.libraries()))


def is_library(file: str, packages: tuple[str, ...] | None = None) -> bool:
    """Return whether a source file belongs to one of these packages, or is generated code such as "<string>"."""
    packages = libraries() if packages is None else packages
    return file.startswith("<") or any(file.startswith(folder_of(package)) for package in packages)
