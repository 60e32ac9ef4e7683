"""Installed kernels by name: forge's own, and third parties' under the entry point `forge.kernels`. A kernel is
imported when it is loaded."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from forge import registry
from forge.errors import KernelError
from forge_kernels.contract import Functional, Kernel, Subgraph


def names() -> list[str]:
    """Return the names of installed kernels, from metadata only."""
    return list(registry.installed("kernel"))


def load(name: str) -> Kernel:
    """Import the kernel of that name; raise KernelError if it is not a valid one."""
    kernel = registry.load("kernel", name)
    if not isinstance(kernel, Kernel):
        entry = registry.installed("kernel")[name]
        raise KernelError(
            f"The kernel {name!r} of {registry.origin(entry)} is registered as {entry.value}, which is a "
            f"{type(kernel).__name__}, not a forge_kernels.contract.Kernel. Repair or uninstall that package."
        )
    if kernel.name != name:
        entry = registry.installed("kernel")[name]
        raise KernelError(
            f"{registry.origin(entry)} registers the kernel {kernel.name!r} as {name!r}: the names must be equal."
        )
    return kernel


def package_version(package: str) -> str | None:
    """Return the version of an installed package without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def version(kernel: Kernel) -> str:
    """Return a short hash over a kernel's source: its module, and all modules of its package that it uses."""
    digest = hashlib.sha256()
    for file in sorted({Path(str(module.__file__)) for module in _modules(kernel) if module.__file__}):
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:16]


def _modules(kernel: Kernel) -> set[ModuleType]:
    found: set[ModuleType] = set()
    for function in (kernel.function, *map(_stand_in, kernel.replaces)):
        module = _home(inspect.unwrap(function))
        if module is not None:
            _gather(module, _package(module.__name__), found)
    return found


def _package(module: str) -> str:
    """Return the top-level package of a module."""
    return module.partition(".")[0]


def _stand_in(target: Functional | Subgraph) -> Callable[..., Any]:
    return target.rewrite if isinstance(target, Subgraph) else target.call


def _gather(module: ModuleType, package: str, found: set[ModuleType]) -> None:
    if module in found:
        return
    found.add(module)
    for value in list(vars(module).values()):
        used = value if isinstance(value, ModuleType) else _home(value)
        if used is not None and used.__name__.startswith(package):
            _gather(used, package, found)


def _home(value: object) -> ModuleType | None:
    """Return the module in which an object was defined."""
    name = getattr(value, "__module__", None)
    return sys.modules.get(name) if isinstance(name, str) else None
