"""Flags of the whole process that a plugin may set and must restore: of torch, the environment, signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from forge.testing.subject import Subject


def _environment() -> dict[str, str]:
    """Return all variables, except those that torch's compilers set."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "TRITON", "_TORCHINDUCTOR"))
    }


def _restore_environment(then: dict[str, str]) -> None:
    for name in _environment().keys() - then.keys():
        del os.environ[name]
    os.environ.update(then)


Flag = tuple[Callable[[], Any], Callable[[Any], Any]]


def _attribute(owner: Any, name: str) -> Flag:
    return lambda: getattr(owner, name), lambda then: setattr(owner, name, then)


def _handler(number: int) -> Flag:
    return lambda: signal.getsignal(number), lambda then: signal.signal(number, then)


def _restore_filters(then: list[Any]) -> None:
    warnings.resetwarnings()  # Python remembers which filter took which warning, until the list is changed by it
    warnings.filters[:] = then  # pyright: ignore[reportIndexIssue]


def global_registries(owner: Any) -> list[str]:
    """Return the names of a module of torch's under which hooks on everything are registered."""
    return [name for name in vars(owner) if name.startswith("_global_") and name.endswith("_hooks")]


def _registry(owner: Any, name: str) -> Flag:
    hooks = getattr(owner, name)

    def restore(then: dict[int, Any]) -> None:
        hooks.clear()
        hooks.update(then)

    return lambda: dict(hooks), restore


HOOKED = tuple(sys.modules[kind.__module__] for kind in (nn.Module, torch.optim.Optimizer))
HANDLED = [number for number in signal.Signals if number not in (signal.SIGKILL, signal.SIGSTOP)]

FLAGS: dict[str, Flag] = {
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.is_grad_enabled()": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.get_default_device()": (torch.get_default_device, torch.set_default_device),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "torch.is_anomaly_enabled()": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch.are_deterministic_algorithms_enabled()": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "torch.get_float32_matmul_precision()": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch.is_autocast_enabled('cpu')": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
    ),
    "torch.backends.cudnn.benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "torch.backends.cudnn.deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "os.getcwd()": (os.getcwd, os.chdir),
    "os.environ": (_environment, _restore_environment),
    "sys.stdout": _attribute(sys, "stdout"),
    "sys.stderr": _attribute(sys, "stderr"),
    "warnings.showwarning": _attribute(warnings, "showwarning"),
    "threading.excepthook": _attribute(threading, "excepthook"),
    **{f"the handler of {number.name}": _handler(number) for number in HANDLED},
    **{f"{owner.__name__}.{name}": _registry(owner, name) for owner in HOOKED for name in global_registries(owner)},
}
"""How each flag is read, and how it is restored."""
SHARED: dict[str, Flag] = {
    **FLAGS,
    "sys.excepthook": _attribute(sys, "excepthook"),
    "warnings.filters": (lambda: list(warnings.filters), _restore_filters),
    "sys.meta_path": (lambda: list(sys.meta_path), lambda then: sys.meta_path.__setitem__(slice(None), then)),
}
"""All flags: also those that packages of others change when they are imported or begin, and do not restore."""


def read_flags(flags: Iterable[str] = SHARED) -> dict[str, Any]:
    """Return the present values of these flags."""
    return {name: SHARED[name][0]() for name in flags}


def changed_flags(before: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the flags that differ from an earlier reading, with their present values."""
    now = read_flags(before)
    return [(name, value) for name, value in now.items() if value is not before[name] and value != before[name]]


@contextmanager
def flags_kept(subject: Subject, what: str) -> Iterator[None]:
    """Raise if a flag of the process has changed at the end; it is restored in any case."""
    before = read_flags(FLAGS)
    try:
        yield
    finally:
        changed = [(name, before[name], now) for name, now in changed_flags(before)]
        for name, then, _ in changed:
            FLAGS[name][1](then)
        if changed and not isinstance(sys.exc_info()[1], AssertionError):
            name, then, now = changed[0]
            raise AssertionError(
                f"{subject.name!r} leaves {name} changed after {what}: {_change(then, now)}. Restore it in forge_end, "
                "also after an error."
            )


def _change(then: Any, now: Any) -> str:
    if isinstance(then, dict) and isinstance(now, dict):
        key = next(key for key in [*now, *then] if then.get(key) != now.get(key))
        return f"{key} is {now.get(key)!r} instead of {then.get(key)!r}"
    return f"{now!r} instead of {then!r}"
