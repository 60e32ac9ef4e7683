"""NVTX ranges, which Nsight Systems shows beside the kernels: phases of a step, and hooks of plugins."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from pluggy import HookImpl

import forge
from forge.contract.dispatch import Instrument
from forge.contract.stack import CORE, ONE_BY_ONE
from forge.env import pick_device

Function = Callable[..., Any]


def on_cuda(trainer: forge.Run) -> bool:
    """Whether the run will be on a CUDA device; without one NVTX is not there."""
    return pick_device(trainer.device).type == "cuda"


@contextmanager
def nvtx_range(name: str) -> Generator[None]:
    """Open a range of this thread, and close it whatever happens."""
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


class HookRanges:
    """Implements `trainer.instrument` for one run: a range around every implementation of a hook by a plugin. The code
    of a wrapper before its yield and the code after it get a range each."""

    def __init__(self, leave_out: Any, inner: Instrument | None):
        self.leave_out, self.inner = leave_out, inner

    def instrument(self, hook: str, impl: HookImpl) -> Function:
        function: Function = impl.function if self.inner is None else self.inner(hook, impl)
        if impl.plugin_name == CORE or impl.plugin is self.leave_out or hook in ONE_BY_ONE:
            return function
        name = f"{impl.plugin_name}: {hook}"
        if impl.wrapper:
            return lambda *args: RangedWrapper(function(*args), name)

        def call(*args: Any) -> Any:
            with nvtx_range(name):
                return function(*args)

        return call


class RangedWrapper:
    """A wrapper's generator, each part of it in a range."""

    __slots__ = ("_generator", "_name")

    def __init__(self, generator: Generator[None, Any, Any], name: str):
        self._generator, self._name = generator, name

    @property
    def gi_code(self) -> Any:
        """For messages that name the wrapper."""
        return self._generator.gi_code  # pyright: ignore[reportAttributeAccessIssue]

    def __next__(self) -> None:
        with nvtx_range(self._name):
            return next(self._generator)

    def send(self, value: Any) -> None:
        with nvtx_range(self._name):
            return self._generator.send(value)

    def throw(self, error: BaseException) -> None:
        with nvtx_range(self._name):
            return self._generator.throw(error)

    def close(self) -> None:
        self._generator.close()
