"""Replace functions of torch by kernels, and restore them."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from forge.errors import KernelError

Function = Callable[..., Any]


class StandIns:
    """Functions of torch by full name, and what each is replaced by while this context is entered: a function that is
    called with the original before its arguments. A function is replaced where it is defined."""

    def __init__(self, calls: Mapping[str, Function] | None = None):
        self._functions: list[tuple[Any, str, Function]] = []
        self._before: list[Function] = []
        for target, call in (calls or {}).items():
            path, _, name = target.rpartition(".")
            try:
                owner = pkgutil.resolve_name(path)
                # made once: torch.compile would take a new function for another one
                self._functions.append((owner, name, _stand_in(getattr(owner, name), call)))
            except (AttributeError, ImportError) as error:
                raise KernelError(f"A kernel replaces {target}, which cannot be found ({error}).") from error

    def __enter__(self) -> None:
        for owner, name, function in self._functions:
            self._before.append(getattr(owner, name))
            setattr(owner, name, function)

    def __exit__(self, *error: object) -> None:
        for owner, name, _ in reversed(self._functions):
            setattr(owner, name, self._before.pop())


def _stand_in(original: Function, call: Function) -> Function:
    # no functools.wraps: torch.compile would take this for torch's own function
    def stand_in(*args: Any, **options: Any) -> Any:
        return call(original, *args, **options)

    return stand_in
