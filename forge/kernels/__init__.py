"""`forge.kernels` is the package `forge_kernels` under its public name.

A submodule is one object under both names: `forge.kernels.contract` is `forge_kernels.contract`. The other files in
this folder never run: they show the documented submodules to type checkers.
"""

import sys
from importlib import import_module, util
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_kernels import *  # noqa: F403


class _Alias(MetaPathFinder, Loader):
    """Import `forge.kernels.x` as `forge_kernels.x`."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        is_alias = fullname.startswith("forge.kernels.") and util.find_spec(_real(fullname)) is not None
        return ModuleSpec(fullname, self) if is_alias else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(_real(module.__name__))  # the import system returns this entry


def _real(name: str) -> str:
    return name.replace("forge.kernels", "forge_kernels", 1)


sys.meta_path.insert(0, _Alias())  # before the finder of files, which would import them a second time
sys.modules[__name__] = import_module("forge_kernels")
