"""Check of leaks: hooks on the task, threads, open files, tensors and autograd graphs."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.engine.trainer import Trainer
from forge.testing.process_flags import flags_kept
from forge.testing.subject import Subject

HOOKS = [*(name for name in vars(nn.Module()) if name.endswith("_hooks")), "_post_accumulate_grad_hooks"]
"""The hook registries of a module or a parameter."""
GRAPHS_AT = (6, 8)
"""Updates after which tensors with a graph are counted: all batch shapes and a validation have occurred."""
GRACE = 1.0
"""Seconds that a thread has to end."""
_is_frozen: bool | None = None


def check_leaks(subject: Subject) -> None:
    """Fit three times: the first must leave nothing on the task or in the process, and the others must not grow."""
    plugin = subject.make()
    task = subject.situation.task()
    with flags_kept(subject, "a fit"), subject.surviving(subject.situation.name):
        subject.fit(plugin, task=task)
    check_task(subject, task, "a fit")
    del plugin, task
    with _ignoring_older_objects():
        before, after = _leftovers(subject), _leftovers(subject)
    what = f"after {subject.situation.name}"
    assert not after.is_task_alive, f"{subject.name!r} keeps the task alive after the run and the plugin are deleted."
    assert after.tensors <= before.tensors, (
        f"{subject.name!r} leaves {after.tensors - before.tensors} tensors behind {what}: memory grows with every run. "
        "Look for a cache, a hook that was not removed, or tensors with an autograd graph (detach them)."
    )
    for thread in after.threads - before.threads:
        thread.join(GRACE)
    running = [thread.name for thread in after.threads - before.threads if thread.is_alive()]
    assert not running, (
        f"{subject.name!r} leaves a thread running {what}: {', '.join(running)}. Stop it, and join it, in forge_end."
    )
    opened = sorted(after.files - before.files)
    assert not opened, f"{subject.name!r} leaves a file open {what}: {', '.join(opened)}. Close it in forge_end."


def check_graphs(subject: Subject) -> None:
    """Refuse tensors that outlive their update with their graph."""
    with _ignoring_older_objects():
        probe = GraphProbe()
        subject.fit(subject.make(), probe, max_updates=GRAPHS_AT[1])
    assert not probe.kept, (
        f"{subject.name!r} keeps {probe.kept} of an update's tensors alive with their autograd graph, so memory "
        "grows with every update. Keep tensor.detach(), or pass it to step.record."
    )


def check_task(subject: Subject, task: nn.Module, what: str) -> None:
    """Refuse hooks that remain on the task's modules and parameters."""
    owners: list[tuple[str, Any]] = [(path or "the task itself", module) for path, module in task.named_modules()]
    owners += [(f"the parameter {name}", tensor) for name, tensor in task.named_parameters()]
    for name, owner in owners:
        found = next((hooks for kind in HOOKS if (hooks := getattr(owner, kind, None))), None)
        assert found is None, (
            f"{subject.name!r} leaves a hook on {name} after {what}: {_called(found)}. Keep the handle, and call "
            "handle.remove() in forge_end."
        )


def _called(registry: Any) -> str:
    function = next(iter(registry.values()))
    return getattr(function, "__qualname__", repr(function))


# -- growth -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What remains after a run is deleted."""

    tensors: int
    is_task_alive: bool
    threads: frozenset[threading.Thread]
    files: frozenset[str]


def _leftovers(subject: Subject) -> Leftovers:
    task = weakref.ref(subject.fit(subject.make())[0])
    gc.collect()
    return Leftovers(
        sum(1 for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)),
        task() is not None,
        frozenset(threading.enumerate()),
        _open_files(),
    )


def _open_files() -> frozenset[str]:
    """Return the names of open files; empty where the system does not list them."""
    found: list[str] = []
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            found.append(os.readlink(link))
    return frozenset(name for name in found if name.startswith("/") and not name.startswith(("/dev/", "/proc/")))


@contextmanager
def _ignoring_older_objects() -> Iterator[None]:
    """Have the garbage collector skip existing objects: a test process holds millions.

    A process that has frozen its own already is left as it is. Whether it has is asked once: the answer counts them.
    """
    global _is_frozen
    if _is_frozen is None:
        _is_frozen = gc.get_freeze_count() > 0
    frozen = _is_frozen
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


class GraphProbe(Plugin):
    """Counts tensors that outlive their update with their graph."""

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
            known = {id(tensor) for ref in self._first if (tensor := ref()) is not None}  # a compiler keeps some
            self.kept = sum(1 for tensor in _with_graph() if id(tensor) not in known)


def _with_graph() -> list[Tensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and thing.grad_fn is not None]
