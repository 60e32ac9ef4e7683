"""Installed kernels by name: forge's own, and third parties' under the entry point `forge.kernels`. A kernel is
imported when it is loaded."""

from __future__ import annotations

from forge import registry
from forge.errors import KernelError
from forge_kernels.contract import Kernel


def names() -> list[str]:
    """Return the names of installed kernels, from metadata only."""
    return list(registry.installed("kernel"))


def load(name: str) -> Kernel:
    """Import the kernel of that name; raise KernelError if it is not a valid one."""
    kernel = registry.load("kernel", name)
    entry = registry.installed("kernel")[name]
    if not isinstance(kernel, Kernel):
        raise KernelError(
            f"The kernel {name!r} of {registry.origin(entry)} is registered as {entry.value}, which is a "
            f"{type(kernel).__name__}, not a forge_kernels.contract.Kernel. Repair or uninstall that package."
        )
    if kernel.name != name:
        raise KernelError(
            f"{registry.origin(entry)} registers the kernel {kernel.name!r} as {name!r}: the names must be equal."
        )
    return kernel
