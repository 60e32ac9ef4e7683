"""Source files of libraries, which no message about the user's code should name."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec

LIBRARIES = ("forge", "forge_kernels", "forge_lightning", "forge_plugins", "pluggy", "torch")


@functools.cache
def folder_of(package: str) -> str:
    """Return the folder of a top-level package, with a separator at its end; the package is not imported."""
    spec = find_spec(package)
    origin = spec.origin if spec is not None else None
    return os.path.dirname(os.path.abspath(origin)) + os.sep if origin else f"<{package} is not installed>"


def is_library(file: str, packages: tuple[str, ...] = LIBRARIES) -> bool:
    """Return whether a source file belongs to one of these packages, or is generated code such as "<string>"."""
    return file.startswith("<") or any(file.startswith(folder_of(package)) for package in packages)
