"""The cases, a file per package: `PACKAGE` says what to install, and every public function of the file is a case, which
returns (module, train loader, val loader or None)."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any


def cases() -> dict[str, Callable[[], Any]]:
    """Every case by name."""
    found: dict[str, Callable[[], Any]] = {}
    for item in pkgutil.iter_modules(__path__):
        file = importlib.import_module(f"{__name__}.{item.name}")
        own = inspect.getmembers(file, lambda value, of=file.__name__: getattr(value, "__module__", "") == of)
        found |= {name: case for name, case in own if inspect.isfunction(case) and not name.startswith("_")}
    return dict(sorted(found.items()))
