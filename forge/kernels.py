"""`forge.kernels` is the package `forge_kernels` under its public name.

The operators live beside the built-in plugins; nothing else in forge refers to them. A submodule is one object under
both names: `forge.kernels.contract` is `forge_kernels.contract`.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_kernels import *  # noqa: F403

HERE, THERE = f"{__name__}.", "forge_kernels."


class _Alias(MetaPathFinder, Loader):
    """Import `forge.kernels.x` as `forge_kernels.x`."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith(HERE) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(THERE + spec.name.removeprefix(HERE))
        self.own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own  # the import system has put the alias's there


sys.meta_path.insert(0, _Alias())
sys.modules[__name__] = import_module("forge_kernels")
