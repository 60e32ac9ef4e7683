"""Exchange: give samples the values of others, to see what a loss comes to without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forge.data.accumulation_windows import batch_size
from forge.torch_internals import pytree
from forge_doctor.patient import tensors

FEWEST = 4
"""Samples below which an order of them can be learnt."""
MOST = 8
"""Tensors of a batch that are tried."""


@dataclass
class Exchange:
    """A tensor of the batch whose rows change places at each use; None: those of what modules are given.

    It draws from a generator of its own, so that each use has another order whatever the seed of the step.
    """

    place: int | None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def of(self, batch: Any) -> Any:
        """The batch, with another order of these rows each time."""
        leaves, shape = pytree.tree_flatten(batch)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if self.place is not None:
            x = leaves[places[self.place]]
            leaves[places[self.place]] = x[self._order(len(x)).to(x.device)]
        return pytree.tree_unflatten(leaves, shape)

    def _order(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self.generator)

    @contextmanager
    def inside(self, task: nn.Module, size: int) -> Iterator[None]:
        """Have modules that the step calls itself get their rows in another order, one of its own for each call."""
        depth, handles = 0, []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            return _reordered((args, kwargs), self._order(size)) if depth == 1 else None

        def leave(*_: Any) -> None:
            nonlocal depth
            depth -= 1

        if self.place is None:
            for module in task.modules():
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def most_telling(task: nn.Module, batch: Any, loss: Callable[[Any], float]) -> tuple[Exchange | None, float]:
    """The exchange that raises the loss of a trained task most, and by how much; None where there is none."""
    size = batch_size(batch)
    if size is None or size < FEWEST:
        return None, 0.0
    rowed = [place for place, x in enumerate(tensors(batch)) if x.ndim and len(x) == size][:MOST]
    before, best, most = loss(batch), None, 0.0
    for exchange in [Exchange(place) for place in rowed if len(rowed) > 1] + [Exchange(None)]:
        try:
            with exchange.inside(task, size):
                rise = loss(exchange.of(batch)) - before
        except Exception:  # a step that takes such rows in one order alone, as packed sequences
            continue
        if rise > most:
            best, most = exchange, rise
    return best, most


def _reordered(tree: Any, order: Tensor) -> Any:
    """What a call is given, with the rows of samples in another order."""
    is_rowed = lambda x: isinstance(x, Tensor) and x.ndim > 0 and len(x) == len(order)  # noqa: E731
    return pytree.tree_map(lambda x: x[order.to(x.device)] if is_rowed(x) else x, tree)
