"""Looking: one forward of the first batch, without a trace in the run, to see which calls a kernel could replace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import forge
from forge.diagnose.checks import LossWatch
from forge.snapshot.sandbox import uncompiled, without_side_effects
from forge_kernels.call_pattern import Call, Like, Unknown
from forge_kernels.contract import Functional, Module
from forge_kernels.patch import StandIns, modules_of, recording, swapped
from forge_kernels.selection import Candidate

logger = logging.getLogger("forge")


class ObservedCalls:
    """The calls of one forward: how often each kind came, and which modules make it."""

    def __init__(self) -> None:
        self.calls: dict[Call, Call] = {}
        "By kind, the first of each."
        self.counts: dict[Call, int] = {}
        self.modules: dict[Call, list[str]] = {}

    def note(self, call: Call, path: str | None = None) -> None:
        kind = call.kind
        self.calls.setdefault(kind, call)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        paths = self.modules.setdefault(kind, [])
        if path is not None and path not in paths:
            paths.append(path)


def observe_calls(step: forge.Step, candidates: Sequence[Candidate], compiled: bool) -> ObservedCalls:
    """What the first batch calls of all that the candidates replace. Nothing is kept for a backward, so it takes the
    memory of an evaluation. A forward that fails has shown nothing: the run's own is about to fail in the same way.

    Torch's losses are looked at too, as in the first batch of every eager run: a kernel in their place hides them from
    that. What is wrong with them counts as a failure here, so that the run's own forward meets torch's function.
    """
    trainer, seen = step.trainer, ObservedCalls()
    functions = {c.target for c in candidates if isinstance(c.replaces, Functional)}
    try:
        with ExitStack() as stack:
            stack.enter_context(without_side_effects(trainer))
            stack.enter_context(uncompiled())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_dropped, _gone))
            stack.enter_context(StandIns({target: recording(target, seen.note) for target in sorted(functions)}))
            stack.enter_context(_watching(trainer.task, candidates, seen))
            if trainer.task.check_first_batch and not compiled:
                stack.enter_context(LossWatch())
            batch = trainer.hooks.forge_prepare_batch(step, step.window[0])
            trainer.hooks.forge_forward(step, batch)
    except Exception as error:
        logger.debug("kernels: the first batch could not be looked at: %s", error)
        return ObservedCalls()
    return seen


@contextmanager
def _watching(task: nn.Module, candidates: Sequence[Candidate], seen: ObservedCalls) -> Iterator[None]:
    """Meanwhile every call of a module that a candidate can replace is noted."""
    handles: list[Any] = []
    try:
        for target in sorted({c.target for c in candidates if isinstance(c.replaces, Module)}):
            for path in modules_of(task, target):
                module = task.get_submodule(path)
                if _can_be_swapped(module, target, path, candidates):
                    noting = partial(_note, seen, target, path)
                    handles.append(module.register_forward_pre_hook(noting, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(seen: ObservedCalls, target: str, path: str, module: nn.Module, args: Any, options: Any) -> None:
    try:
        parameters = [str(Like.of(parameter)) for parameter in module.parameters()]
        seen.note(Call.of(target, args, options, f"{module!r} {', '.join(parameters)}"), path)
    except Unknown:
        return


def _can_be_swapped(module: nn.Module, target: str, path: str, candidates: Sequence[Candidate]) -> bool:
    """Whether a candidate takes it. What is sharded, or compiled by itself, was made what it is before: it stays."""
    if module._compiled_call_impl is not None or not all(type(p) is nn.Parameter for p in module.parameters()):
        return False
    swaps = [(c.replaces, c.kernel.name) for c in candidates if isinstance(c.replaces, Module) and c.target == target]
    return any(swapped(module, replaces.swap, name, path) is not None for replaces, name in swaps)


def _dropped(tensor: Tensor) -> None:
    """What autograd would keep for the backward that is not going to come."""


_gone: Callable[[Any], Any] = lambda kept: kept  # noqa: E731
