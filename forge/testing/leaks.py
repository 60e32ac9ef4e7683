"""What does a plugin leave behind? Hooks on the task, threads, open files, tensors, and graphs of tensors."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.engine.trainer import Trainer
from forge.testing.process_flags import flags_kept
from forge.testing.subject import Subject

HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
"""The registries of hooks that each module has."""
GLOBAL_HOOKS = [name for name in vars(nn.modules.module) if name.startswith("_global_") and name.endswith("_hooks")]
GRAPHS_AT = (6, 8)
"""Updates after which tensors with a graph are looked for: all shapes of a batch, and a validation, have been there."""
GRACE = 1.0
"""Seconds that a thread which was told to end has for it."""


def check_leaks(subject: Subject) -> None:
    """Three fits: nothing stays on the task or in the process after the first, nothing grows from the second on."""
    plugin = subject.make()
    task = subject.situation.task()
    with flags_kept(subject, "a fit"), subject.surviving(subject.situation.name):
        subject.fit(plugin, task=task)
    check_task(subject, task, "a fit")
    del plugin, task
    with _only_what_is_new():
        before, after = _left_over(subject), _left_over(subject)
    what = f"after {subject.situation.name}"
    assert not after.task_lives, f"{subject.name!r} keeps the task alive when the run, and the plugin, are forgotten."
    assert after.tensors <= before.tensors, (
        f"{subject.name!r} leaves {after.tensors - before.tensors} tensors behind {what}: memory grows with every run. "
        "Look for a cache, a hook that was not removed, or what autograd was given to keep (detach it)."
    )
    running = [thread.name for thread in after.threads - before.threads if _still_running(thread)]
    assert not running, (
        f"{subject.name!r} leaves a thread running {what}: {', '.join(running)}. Tell it to end, and join it, in "
        "forge_end."
    )
    opened = sorted(after.files - before.files)
    assert not opened, f"{subject.name!r} leaves a file open {what}: {', '.join(opened)}. Close it in forge_end."


def check_graphs(subject: Subject) -> None:
    """No tensor with its graph outlives its update: what a plugin keeps of a loss must be detached."""
    with _only_what_is_new():
        probe = GraphProbe()
        subject.fit(subject.make(), probe, max_updates=GRAPHS_AT[1])
    assert not probe.kept, (
        f"{subject.name!r} keeps {probe.kept} of an update's tensors alive with the graph that made them, so memory "
        "grows with every update. Keep tensor.detach(), or hand it to step.record."
    )


def check_task(subject: Subject, task: nn.Module, what: str) -> None:
    """Refuse hooks that stayed on the task's modules and parameters, or on all modules of the process."""
    for path, module in task.named_modules():
        for kind in HOOKS:
            if getattr(module, kind):
                raise AssertionError(
                    f"{subject.name!r} leaves a hook on the task after {what}: {_called(getattr(module, kind))} in "
                    f"{kind} of {path or 'the task itself'}. Keep the handle, and call handle.remove() in forge_end."
                )
    for name, tensor in task.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(tensor, kind, None):
                raise AssertionError(
                    f"{subject.name!r} leaves a hook on the parameter {name} after {what}: "
                    f"{_called(getattr(tensor, kind))}. Keep the handle, and call handle.remove() in forge_end."
                )
    for kind in GLOBAL_HOOKS:
        registry: Any = getattr(nn.modules.module, kind)
        if registry:
            called = _called(registry)
            registry.clear()
            raise AssertionError(
                f"{subject.name!r} leaves a hook on all modules of the process after {what}: {called}. Call "
                "handle.remove() in forge_end."
            )


def _called(registry: Any) -> str:
    function = next(iter(registry.values()))
    return getattr(function, "__qualname__", repr(function))


# ---------------------------------------------------------------------------------------------------------------------
# What grows


@dataclass(frozen=True, slots=True)
class LeftOver:
    """What is there once a run is forgotten."""

    tensors: int
    task_lives: bool
    threads: frozenset[threading.Thread]
    files: frozenset[str]


def _left_over(subject: Subject) -> LeftOver:
    task = weakref.ref(subject.fit(subject.make())[0])
    gc.collect()
    return LeftOver(
        sum(1 for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)),
        task() is not None,
        frozenset(threading.enumerate()),
        _open_files(),
    )


def _still_running(thread: threading.Thread) -> bool:
    """One that was told to end gets the time for it."""
    thread.join(GRACE)
    return thread.is_alive()


def _open_files() -> frozenset[str]:
    """What is open, by name; "" where the system does not tell."""
    found = []
    for link in Path("/proc/self/fd").glob("*") if Path("/proc/self/fd").is_dir() else ():
        try:
            found.append(os.readlink(link))
        except OSError:
            continue
    return frozenset(name for name in found if name.startswith("/") and not name.startswith(("/dev/", "/proc/")))


@contextmanager
def _only_what_is_new() -> Iterator[None]:
    """Have the collector pass over whatever there is by now: a test process holds millions of objects."""
    frozen = gc.get_freeze_count()
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


class GraphProbe(Plugin):
    """Counts tensors that have outlived their update together with the graph they came from."""

    observer = True

    def __init__(self) -> None:
        super().__init__()
        self.name, self.kept = "forge.testing.graphs", 0
        self._first: list[weakref.ref[Tensor]] = []

    @hookimpl
    def forge_boundary(self, trainer: Trainer) -> None:
        if trainer.progress.update == GRAPHS_AT[0]:
            self._first = [weakref.ref(tensor) for tensor in _with_graph()]
        elif trainer.progress.update == GRAPHS_AT[1]:
            known = {id(tensor) for ref in self._first if (tensor := ref()) is not None}  # a compiler keeps some, once
            self.kept = sum(1 for tensor in _with_graph() if id(tensor) not in known)


def _with_graph() -> list[Tensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and thing.grad_fn is not None]
