"""Run one stage of a task by its own step.

Every rank runs the task's `training_step` itself. Blocks of earlier stages are not computed: the first block of the
stage gets what the stage before sent. At the first block of the next stage the step is left, with that block's input
as the stage's output. So whatever the step computes outside of blocks (embeddings, masks, noise, the loss) is there
where it is needed, and its parameters are on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from forge.errors import TaskError
from forge.rng import combine_seeds, reseed


class StageEnded(Exception):
    """Leaves the task's step at the first block of the next stage."""

    def __init__(self, output: Tensor):
        self.output = output


class BlockCalls:
    """The calls of a task's blocks, while a stage runs."""

    def __init__(self, blocks: dict[str, nn.Module], task: str):
        self._blocks, self._task = blocks, task
        self._begin = self._end = -1
        self._next, self._input, self._seed = 0, None, 0
        for number, block in enumerate(blocks.values()):
            block.forward = self._instead(number, list(blocks)[number], block.forward)

    def remove(self) -> None:
        for block in self._blocks.values():
            del block.forward

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

    def _instead(self, number: int, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Any, *args: Any, **kwargs: Any) -> Any:
            if self._begin < 0:
                return forward(x, *args, **kwargs)
            if number != self._next:
                raise TaskError(
                    f"pipeline: {self._task} calls {name} out of order. A pipeline needs blocks that are called once "
                    "each, one after the other; name others in pipeline.split."
                )
            self._next += 1
            if not isinstance(x, Tensor):
                raise TaskError(f"pipeline: {name} gets a {type(x).__name__} first; blocks pass on one tensor.")
            if number == self._end:
                raise StageEnded(x)
            if number < self._begin:
                return x.new_full((), float("nan")).expand(x.shape)  # whatever else uses it shows
            if number == self._begin:
                reseed(combine_seeds(self._seed, 1 + number))
                x = x if self._input is None else self._input
            return forward(x, *args, **kwargs)

        return call
