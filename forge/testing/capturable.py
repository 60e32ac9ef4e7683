"""Check of `capturable = True`: no hook inside an update may read a value of the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from pluggy import HookImpl
from torch import Tensor
from torch.overrides import TorchFunctionMode

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.stack import INSIDE
from forge.diagnose.syncs import reads_of_the_device
from forge.engine.trainer import Trainer
from forge.testing.hook_calls import Function, HookCalls
from forge.testing.subject import Subject
from forge.torch_internals import TorchDispatchMode, pytree
from forge.util.frames import is_library
from forge.util.text import short_path

READS = {
    "aten::_local_scalar_dense": "a number is read from a tensor (.item(), float(), bool(), `if tensor:`)",
    "aten::equal": "two tensors are compared on the host (torch.equal)",
    "aten::is_nonzero": "a tensor is asked whether it is true",
    "aten::nonzero": "the size of what nonzero returns is read",
    "aten::masked_select": "the size of what masked_select returns is read",
    "aten::_unique2": "the size of what unique returns is read",
    "aten::unique_dim": "the size of what unique returns is read",
}
"""Operations that make the host wait for the device."""
TO_HOST: dict[Any, str] = {
    Tensor.tolist: "a tensor becomes a list (.tolist())",
    Tensor.numpy: "a tensor becomes an array (.numpy())",
    Tensor.cpu: "a tensor is copied to the host (.cpu())",
}


class DeviceRead(Exception):
    """A value of the device was read inside an update."""


def check_capturable(subject: Subject) -> None:
    """Run a fit that detects every read inside the plugin's step hooks; on CUDA torch detects them."""
    plugin = subject.make()
    if not any(getattr(plugin, hook, None) is not None for hook in INSIDE):
        return
    watch = DeviceReadWatch(plugin, _no_sync if torch.cuda.is_available() else _no_read)
    try:
        subject.fit(plugin, watch, device="cuda" if torch.cuda.is_available() else "cpu")
    except DeviceRead as read:
        raise AssertionError(
            f"{subject.name!r} declares capturable = True, but waits for the device in {watch.hook}: {read}. Inside a "
            "CUDA graph that is an error. Keep it a tensor, pass it to step.record, or read it in forge_step_end."
        ) from None


class DeviceReadWatch(HookCalls):
    """Runs the plugin's own code in an update inside `strict`, and nothing else."""

    def __init__(self, plugin: Plugin, strict: Callable[[], Any]):
        super().__init__()
        self.name, self.plugin, self.strict = "forge.testing.reads", plugin, strict
        self.hook = ""
        "The latest hook of the plugin."

    @hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        trainer.means.on_host = False  # on the host recorded values are read at once, which is free there

    def around(self, hook: str, impl: HookImpl, function: Function) -> Function:
        if impl.plugin is not self.plugin or hook not in INSIDE:
            return function

        def plain(*args: Any) -> Any:
            self.hook = hook
            with self.strict():
                return function(*args)

        def wrapper(*args: Any) -> Generator[None, Any, Any]:
            inner = function(*args)
            go_on: Callable[[], Any] = partial(next, inner)
            while True:
                self.hook = hook
                with self.strict():
                    try:
                        go_on()
                    except StopIteration as stop:
                        return stop.value
                try:
                    go_on = partial(inner.send, (yield))
                except BaseException as error:
                    go_on = partial(inner.throw, error)

        return wrapper if impl.wrapper else plain


@contextmanager
def _no_sync() -> Iterator[None]:
    """Raise where torch says that the host waited for a CUDA device."""
    with reads_of_the_device() as lines:
        yield
    if lines:
        raise DeviceRead(f"the host waits, at {lines[0]}")


@contextmanager
def _no_read() -> Iterator[None]:
    """Raise on calls that would wait on a device, found by name, because a CPU never waits.

    `tensor.is_cpu` is False meanwhile: code may read where reading is free.
    """
    with _Operations(), _Methods():
        yield


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in READS:
            raise DeviceRead(f"{READS[name]}, at {_own_line(sys._getframe())}")
        masks = [part for part in pytree.tree_leaves(args[1:]) if isinstance(part, Tensor) and part.dtype is torch.bool]
        if name == "aten::index" and masks:
            raise DeviceRead(f"the size of what a mask picks is read, at {_own_line(sys._getframe())}")
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_cpu.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return False
        # a torch.device may be that of another tensor, which is the CPU only in this check
        to_host = func is Tensor.to and "cpu" in (*args[1:2], (kwargs or {}).get("device"))
        if func in TO_HOST or to_host:
            raise DeviceRead(f"{TO_HOST.get(func, TO_HOST[Tensor.cpu])}, at {_own_line(sys._getframe())}")
        return func(*args, **(kwargs or {}))


def _own_line(frame: FrameType | None) -> str:
    """Return the innermost line, from a frame outwards, outside torch and forge."""
    while frame is not None and is_library(frame.f_code.co_filename, ("forge", "torch")):  # plugins are looked at
        frame = frame.f_back
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else "an unknown place"
