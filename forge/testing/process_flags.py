"""Flags of the whole process that a plugin may set and must restore: of torch, the environment, signals."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
    "the handler of SIGINT": _handler(signal.SIGINT),
    "the handler of SIGTERM": _handler(signal.SIGTERM),
}
"""How each flag is read, and how it is restored."""


@contextmanager
def flags_kept(subject: Subject, what: str) -> Iterator[None]:
    """Raise if a flag of the process has changed at the end; it is restored in any case."""
    before = {name: read() for name, (read, _) in FLAGS.items()}
    try:
        yield
    finally:
        after = {name: read() for name, (read, _) in FLAGS.items()}
        changed = [
            (name, then, after[name])
            for name, then in before.items()
            if then is not after[name] and then != after[name]
        ]
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
