"""The formats of an export, one module each: how a file is written, and how it is run without the task's code.

A package offers one by the entry point `forge.export_formats`: a module with `ABOUT`, `FILE`, `TOLERANCE`,
`write(plan, path)` and `open_file(path, names, device)`; one of weights alone has `WEIGHTS_ONLY` and `read_file(path)`.
One whose programs return what the task returns, in dicts, lists and tuples, says `STRUCTURED`; others get and return a
flat tuple. `PACKAGES` are the modules that it needs, and `EXTRA` is what to install where one is missing.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from forge import registry
from forge.errors import did_you_mean
from forge_ship.engine import ExportError


def formats() -> dict[str, str]:
    """Return every installed format by name, with what it is for; no module is imported."""
    return {name: registry.constant(entry, "ABOUT") for name, entry in registry.installed("format").items()}


def module_of(format: str) -> Any:
    """Import a format's module, after its packages were found."""
    if format not in formats():
        raise ExportError(f"There is no format {format!r}.{did_you_mean(format, formats())}")
    module = registry.load("format", format)
    missing = [name for name in getattr(module, "PACKAGES", ()) if not _is_there(name)]
    if missing:
        asked = f"'{module.EXTRA}'" if hasattr(module, "EXTRA") else " ".join(missing)
        raise ExportError(f"The format {format} needs {' and '.join(missing)}: pip install {asked}")
    return module


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it
        return False
