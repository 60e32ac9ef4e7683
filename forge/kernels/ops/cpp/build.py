import sys
from typing import Any

from forge.kernels import part


def __getattr__(name: str) -> Any:
    """Tell type checkers that there are names; nobody else asks this module."""
    raise AttributeError(name)


sys.modules[__name__] = part("ops.cpp.build")  # the import system returns this entry
