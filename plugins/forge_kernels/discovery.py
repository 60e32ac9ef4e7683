"""Every installed kernel by name: forge's own, and those that third parties offer under the entry point
`forge.kernels`. None is imported until it is asked for."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from forge import registry
from forge.errors import KernelError
from forge_kernels.contract import Functional, Kernel, Module


def names() -> list[str]:
    """What is installed, from metadata alone."""
    return list(registry.installed("kernel"))


def load(name: str) -> Kernel:
    """The kernel of that name."""
    kernel = registry.load("kernel", name)
    if not isinstance(kernel, Kernel):
        entry = registry.installed("kernel")[name]
        raise KernelError(
            f"The kernel {name!r} of {registry.origin(entry)} is registered as {entry.value}, which is a "
            f"{type(kernel).__name__} and no forge_kernels.contract.Kernel. Repair or uninstall that package."
        )
    if kernel.name != name:
        entry = registry.installed("kernel")[name]
        raise KernelError(
            f"{registry.origin(entry)} registers the kernel {kernel.name!r} as {name!r}: the two must be one name."
        )
    return kernel


def version(kernel: Kernel) -> str:
    """A short hash over the source of a kernel: its module, and all of the package around it that it makes use of."""
    digest = hashlib.sha256()
    for file in sorted({Path(str(module.__file__)) for module in _modules(kernel) if module.__file__}):
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:16]


def _modules(kernel: Kernel) -> set[ModuleType]:
    found: set[ModuleType] = set()
    for function in (kernel.function, *(_stand_in(target) for target in kernel.replaces)):
        module = _home(inspect.unwrap(function))
        if module is not None:
            _gather(module, _package(module.__name__), found)
    return found


def _package(module: str) -> str:
    """The top-level package of a module; its modules count as a kernel's source."""
    return module.partition(".")[0]


def _stand_in(target: Functional | Module) -> Callable[..., Any]:
    return target.call if isinstance(target, Functional) else target.swap


def _gather(module: ModuleType, package: str, found: set[ModuleType]) -> None:
    if module in found:
        return
    found.add(module)
    for value in list(vars(module).values()):
        used = value if isinstance(value, ModuleType) else _home(value)
        if used is not None and used.__name__.startswith(package):
            _gather(used, package, found)


def _home(value: object) -> ModuleType | None:
    """The module that something was defined in."""
    name = getattr(value, "__module__", None)
    return sys.modules.get(name) if isinstance(name, str) else None
