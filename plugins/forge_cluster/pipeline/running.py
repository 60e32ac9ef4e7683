"""Run one stage of a task by its own step.

Every rank runs the task's `training_step` itself. Blocks of earlier stages are not computed: the first block of the
stage gets what the stage before sent. At the first block of the next stage the step is left, with that block's input
as the stage's output. So whatever the step computes outside of blocks (embeddings, masks, noise, the loss) is there
where it is needed, and its parameters are on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge.env import map_items
from forge.errors import TaskError
from forge.rng import combine_seeds, reseed


class StageEnded(Exception):
    """Leaves the task's step at the first block of the next stage."""

    def __init__(self, output: Tensor):
        self.output = output


class BlockCalls:
    """The calls of a task's blocks, while a stage runs."""

    def __init__(self, blocks: dict[str, nn.Module], task: str, device: torch.device):
        self._blocks, self._task, self._device = blocks, task, device
        self._begin = self._end = -1
        self._next, self._input, self._seed = 0, None, 0
        self._replaced: set[int] = set()
        "Blocks whose input came from another rank."
        self.forms: dict[int, Any] = {}
        "What blocks return, without values; for batches of the current shapes."
        self._own = [(block, vars(block).get("forward")) for block in blocks.values()]
        self._instead = [self._calling(n, name, block.forward) for n, (name, block) in enumerate(blocks.items())]
        for block, call in zip(blocks.values(), self._instead, strict=True):
            block.forward = call

    def remove(self) -> None:
        for (block, own), call in zip(self._own, self._instead, strict=True):
            if vars(block).get("forward") is call:
                del block.forward
                if own is not None:
                    block.forward = own

    @contextmanager
    def running(self, begin: int, end: int, received: Tensor | None, seed: int) -> Iterator[None]:
        """Run the blocks from `begin` to `end` alone.

        What is drawn before them comes from `seed`, on all ranks alike; from there on from a seed of the stage. Seeds,
        not states of generators: reading numpy's takes as long as a small layer.
        """
        self._begin, self._end, self._input, self._next, self._seed = begin, end, received, 0, seed
        reseed(seed)
        try:
            yield
        finally:
            self._begin, self._input = -1, None

    def _calling(self, number: int, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        first = next(iter(inspect.signature(forward).parameters), "")

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._begin < 0:
                if number in self._replaced and torch.is_grad_enabled():
                    raise self._recomputed(name)
                return forward(*args, **kwargs)
            if number != self._next:
                raise TaskError(
                    f"pipeline: {self._task} calls {name} out of order. A pipeline needs blocks that are called once "
                    "each, one after the other; name others in pipeline.split."
                )
            self._next += 1
            x = args[0] if args else kwargs.get(first)
            if not isinstance(x, Tensor):
                raise TaskError(
                    f"pipeline: {name} gets a {type(x).__name__} first; blocks pass on one tensor. Pass the others as "
                    "further arguments, or use fsdp."
                )
            if number == self._end:
                raise StageEnded(x)
            if number < self._begin:
                return _filled(self.forms[number], self._device)
            if number == self._begin:
                reseed(combine_seeds(self._seed, 1 + number))
                if self._input is not None:
                    if self._input.requires_grad and not torch.is_grad_enabled():
                        raise self._recomputed(name)
                    self._replaced.add(number)
                    args, kwargs = ((self._input, *args[1:]), kwargs) if args else ((), {**kwargs, first: self._input})
            result = forward(*args, **kwargs)
            if number not in self.forms:
                self.forms[number] = _form(result, name)
            elif not isinstance(result, Tensor) and _form(result, name) != self.forms[number]:
                raise TaskError(
                    f"pipeline: {name} returns other numbers or shapes than for an earlier batch of the same shapes, "
                    "which other ranks do not know. Return tensors of one shape, or use fsdp."
                )
            return result

        return call

    def _recomputed(self, name: str) -> TaskError:
        return TaskError(
            f"pipeline: the model computes {name} a second time in its backward pass (gradient_checkpointing_enable(), "
            "or torch.utils.checkpoint around a block), without the input that another rank sent. Remove that, and use "
            "the plugin remat."
        )


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _form(value: Any, name: str) -> Any:
    """Return what a block returned without the values of tensors, so that other ranks can imitate it."""
    if isinstance(value, Tensor):
        return TensorForm(tuple(value.shape), value.dtype)
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return TensorForm((), torch.float64)
    mapped = map_items(value, lambda item: _form(item, name))
    if mapped is None:
        raise TaskError(
            f"pipeline: {name} returns a {type(value).__name__}, which other ranks cannot imitate. Return tensors, or "
            "use fsdp."
        )
    return mapped


def _filled(form: Any, device: torch.device) -> Any:
    """Return a value of that form with NaN in all tensors, of integers too: whatever else uses them shows."""
    if isinstance(form, TensorForm):
        dtype = form.dtype if form.dtype.is_floating_point or form.dtype.is_complex else torch.get_default_dtype()
        return torch.full(form.shape, float("nan"), dtype=dtype, device=device)  # it may be changed in place
    mapped = map_items(form, lambda item: _filled(item, device))
    return form if mapped is None else mapped
