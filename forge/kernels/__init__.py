"""`forge.kernels`: the names of the installed package of kernels, each the same object as there.

The submodules in this folder are the documented ones; each is that package's own module under a second name.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

from forge.registry import public


def package() -> ModuleType:
    """Return the installed package of kernels, or say what to install."""
    try:
        return public("kernels")
    except AttributeError as error:
        raise ModuleNotFoundError(str(error)) from error


def part(name: str) -> ModuleType:
    """Return a module of that package."""
    return import_module(f"{package().__name__}.{name}")


def __getattr__(name: str) -> Any:
    return getattr(package(), name)


def __dir__() -> list[str]:
    return dir(package())
