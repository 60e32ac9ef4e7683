"""Find the calls that a kernel could replace, by one forward of the first batch without side effects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import forge
from forge.diagnose.checks import LossWatch
from forge.snapshot.sandbox import uncompiled, without_side_effects
from forge_kernels import patch
from forge_kernels.contract import Functional, Kernel, Subgraph, dtype_name, leaves
from forge_kernels.timing import Pass, distance

logger = logging.getLogger("forge")

APART = 4
"""Allowed distance to the results of the original, in tolerances: the original has errors too."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel, and one of the functions or patterns that it can replace."""

    kernel: Kernel
    replaces: Functional | Subgraph

    @property
    def target(self) -> str:
        return self.replaces.target


@dataclass(slots=True)
class ObservedCalls:
    """The calls of one forward that candidates could replace."""

    taken: dict[str, int] = field(default_factory=dict)
    "How many calls each kernel takes."
    why_not: dict[str, str] = field(default_factory=dict)
    "Why a kernel does not take a call, by kernel; the first reason."
    kinds: set[str] = field(default_factory=set)
    "Each kind of call (function, shapes and dtypes), and the batch."


def observe_calls(step: forge.Step, candidates: Sequence[Candidate], compiled: bool) -> ObservedCalls:
    """Run the first batch forward, and give each new kind of call to the candidates too, forward and backward: a kernel
    counts if it takes the call and its results are those of the original within its tolerance. If the forward fails,
    return nothing: the run's own forward is about to fail in the same way.

    Torch's losses are checked too, as in the first batch of every eager run, since a kernel would hide them from that
    check. A problem counts as a failure here, so that the run's own forward meets torch's function.
    """
    trainer, seen = step.trainer, ObservedCalls()
    known: dict[str, list[str]] = {}
    targets = sorted({candidate.target for candidate in candidates})
    watching = {target: patch.watched(target, partial(_look, seen, known, target, candidates)) for target in targets}
    try:
        with ExitStack() as stack:
            stack.enter_context(without_side_effects(trainer))
            stack.enter_context(uncompiled())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_dropped, _gone))
            stack.enter_context(patch.StandIns(watching))
            if trainer.task.check_first_batch and not compiled:
                stack.enter_context(LossWatch())
            batch = trainer.hooks.forge_prepare_batch(step, step.window[0])
            seen.kinds.add(kind_of("batch", leaves(batch), {}))
            trainer.hooks.forge_forward(step, batch)
    except Exception as error:
        logger.debug("kernels: the first batch could not be observed: %s", error)
        return ObservedCalls()
    return seen


def _look(
    seen: ObservedCalls,
    known: dict[str, list[str]],
    target: str,
    candidates: Sequence[Candidate],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Note one call, and which kernels take it."""
    kind = kind_of(target, args, options)
    if kind not in known:
        known[kind] = []
        seen.kinds.add(kind)
        for candidate in candidates:
            if candidate.target == target:
                why_not = unfit(candidate, args, options)
                if why_not is None:
                    known[kind].append(candidate.kernel.name)
                else:
                    seen.why_not.setdefault(candidate.kernel.name, why_not)
    for name in known[kind]:
        seen.taken[name] = seen.taken.get(name, 0) + 1


def kind_of(target: str, args: Sequence[Any], options: dict[str, Any]) -> str:
    """Describe a call: its function, its tensors by shape, strides and dtype, and its other arguments."""

    def told(value: Any) -> str:
        if not isinstance(value, Tensor):
            return repr(value)
        return f"{type(value).__name__}{list(value.shape)}{list(value.stride())} {dtype_name(value.dtype)}"

    device = next((value.device.type for value in [*args, *options.values()] if isinstance(value, Tensor)), "cpu")
    autocast = dtype_name(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "no"
    given = [*map(told, args), *(f"{name}={told(value)}" for name, value in options.items())]
    return f"{target}({', '.join(given)}), {autocast} autocast"


class _HandedBack(Exception):
    """A kernel called the original: it does not take the call."""


def unfit(candidate: Candidate, args: Sequence[Any], options: dict[str, Any]) -> str | None:
    """Return why a candidate cannot replace a call, or None. The call's own tensors are its arguments."""
    replaces: Any = candidate.replaces

    def back(*args: Any, **options: Any) -> Any:
        raise _HandedBack

    def results(function: Callable[..., Any]) -> list[Tensor | None]:
        own = [_leaf(value) for value in args], {name: _leaf(value) for name, value in options.items()}
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
            return Pass(function, *own).results()

    try:
        ours = results(partial(replaces.call, back))
        theirs = results(patch.original(candidate.target))
    except _HandedBack:
        return "it does not take this call"
    except Exception as error:
        return f"it fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    if len(ours) != len(theirs):
        return "it returns another number of results"
    bound = APART * max(candidate.kernel.tolerance.get(dtype, 0.0) for dtype in _dtypes(args, options, theirs))
    for place, (result, right) in enumerate(zip(ours, theirs, strict=True)):
        if result is None or right is None:
            if result is not right:
                return "it has gradients for other inputs"
        elif not (off := distance(result, right)) <= bound:
            return f"result {place + 1} is off by {off:.1e}, outputs before gradients"
    return None


def _leaf(value: Any) -> Any:
    """Return a tensor of the graph as a leaf with the same memory."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _dtypes(args: Sequence[Any], options: dict[str, Any], results: Sequence[Tensor | None]) -> set[torch.dtype]:
    """Return all dtypes in a call, that of autocast too."""
    tensors = [value for value in [*args, *options.values(), *results] if isinstance(value, Tensor)]
    cast = {torch.get_autocast_dtype(t.device.type) for t in tensors if torch.is_autocast_enabled(t.device.type)}
    return {tensor.dtype for tensor in tensors} | cast


def _dropped(tensor: Tensor) -> None:
    """Drop the tensors that autograd would keep: no backward follows."""


_gone: Callable[[Any], Any] = lambda kept: kept  # noqa: E731
