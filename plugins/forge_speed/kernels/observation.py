"""Find the calls that a kernel could replace, by one forward of the first batch without side effects."""

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
from forge_kernels.call_pattern import RecordedCall, TensorSpec, Unrecordable
from forge_kernels.contract import Functional, Module
from forge_kernels.patch import StandIns, modules_of, recording, swapped
from forge_kernels.selection import Candidate

logger = logging.getLogger("forge")


class ObservedCalls:
    """The calls of one forward: the count of each kind, and the modules that make it."""

    def __init__(self) -> None:
        self.calls: dict[RecordedCall, RecordedCall] = {}
        "The first call of each kind."
        self.counts: dict[RecordedCall, int] = {}
        self.modules: dict[RecordedCall, list[str]] = {}

    def note(self, call: RecordedCall, path: str | None = None) -> None:
        kind = call.kind
        self.calls.setdefault(kind, call)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        paths = self.modules.setdefault(kind, [])
        if path is not None and path not in paths:
            paths.append(path)


def observe_calls(step: forge.Step, candidates: Sequence[Candidate], compiled: bool) -> ObservedCalls:
    """Return the calls of the first batch that candidates can replace. No activations are kept, so it takes the memory
    of an evaluation. If the forward fails, return nothing: the run's own forward is about to fail in the same way.

    Torch's losses are checked too, as in the first batch of every eager run, since a kernel would hide them from that
    check. A problem counts as a failure here, so that the run's own forward meets torch's function.
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
        logger.debug("kernels: the first batch could not be observed: %s", error)
        return ObservedCalls()
    return seen


@contextmanager
def _watching(task: nn.Module, candidates: Sequence[Candidate], seen: ObservedCalls) -> Iterator[None]:
    """Record every call of a module that a candidate can replace, inside the `with`."""
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
        parameters = [str(TensorSpec.of(parameter)) for parameter in module.parameters()]
        seen.note(RecordedCall.of(target, args, options, f"{module!r} {', '.join(parameters)}"), path)
    except Unrecordable:
        return


def _can_be_swapped(module: nn.Module, target: str, path: str, candidates: Sequence[Candidate]) -> bool:
    """Whether a candidate can replace it. Sharded or separately compiled modules stay unchanged."""
    if module._compiled_call_impl is not None or not all(type(p) is nn.Parameter for p in module.parameters()):
        return False
    swaps = [(c.replaces, c.kernel.name) for c in candidates if isinstance(c.replaces, Module) and c.target == target]
    return any(swapped(module, replaces.swap, name, path) is not None for replaces, name in swaps)


def _dropped(tensor: Tensor) -> None:
    """Drop the tensors that autograd would keep: no backward follows."""


_gone: Callable[[Any], Any] = lambda kept: kept  # noqa: E731
