"""Switches of the whole process that a plugin may turn, and must put back: of torch, the environment, signals."""

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
    """All variables, but for what torch's compilers note there for themselves."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "TRITON"))}


def _put_back_environment(then: dict[str, str]) -> None:
    for name in _environment().keys() - then.keys():
        del os.environ[name]
    os.environ.update(then)


FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.is_grad_enabled()": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.get_default_device()": (torch.get_default_device, torch.set_default_device),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "torch.is_anomaly_enabled()": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch.are_deterministic_algorithms_enabled()": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "torch.get_float32_matmul_precision()": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "torch.is_autocast_enabled('cpu')": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
    ),
    "torch.backends.cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda on: setattr(torch.backends.cudnn, "benchmark", on),
    ),
    "torch.backends.cudnn.deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda on: setattr(torch.backends.cudnn, "deterministic", on),
    ),
    "os.getcwd()": (os.getcwd, os.chdir),
    "os.environ": (_environment, _put_back_environment),
    "sys.stdout": (lambda: sys.stdout, lambda then: setattr(sys, "stdout", then)),
    "sys.stderr": (lambda: sys.stderr, lambda then: setattr(sys, "stderr", then)),
    "warnings.showwarning": (lambda: warnings.showwarning, lambda then: setattr(warnings, "showwarning", then)),
    "the handler of SIGINT": (
        lambda: signal.getsignal(signal.SIGINT),
        lambda then: signal.signal(signal.SIGINT, then),
    ),
    "the handler of SIGTERM": (
        lambda: signal.getsignal(signal.SIGTERM),
        lambda then: signal.signal(signal.SIGTERM, then),
    ),
}
"""Switches of the whole process, by what to ask for them: how they are read, and how they are put back."""


@contextmanager
def flags_kept(subject: Subject, what: str) -> Iterator[None]:
    """Refuse that a switch of the process is another one afterwards; it is put back in any case."""
    before = {name: read() for name, (read, _) in FLAGS.items()}
    try:
        yield
    finally:
        after = {name: read() for name, (read, _) in FLAGS.items()}
        changed = [(name, before[name], after[name]) for name in FLAGS if not _same(before[name], after[name])]
        for name, then, _ in changed:
            FLAGS[name][1](then)
        if changed and not isinstance(sys.exc_info()[1], AssertionError):
            name, then, now = changed[0]
            raise AssertionError(
                f"{subject.name!r} leaves {name} changed after {what}: {_change(then, now)}. Put back in forge_end "
                "what forge_start found, also after an error."
            )


def _same(one: Any, other: Any) -> bool:
    return one is other or one == other


def _change(then: Any, now: Any) -> str:
    if isinstance(then, dict) and isinstance(now, dict):
        key = next(key for key in [*now, *then] if then.get(key) != now.get(key))
        return f"{key} is {now.get(key)!r} instead of {then.get(key)!r}"
    return f"{now!r} instead of {then!r}"
