"""How much memory activations take, block by block, and which blocks to compute again for it to fit a budget."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forge.optim.sharded import local
from forge.torch_internals import pytree
from forge.util.tensors import storage_key

UNITS = {unit: 10 ** (3 * i) for i, unit in enumerate(("b", "kb", "mb", "gb", "tb"))} | {
    unit: 2 ** (10 * i) for i, unit in enumerate(("kib", "mib", "gib", "tib"), start=1)
}


def size_in_bytes(text: str) -> int | None:
    """ "2 GB" as a number, None if it is not a size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]+)\s*", text)
    unit = UNITS.get(match[2].lower()) if match else None
    return int(float(match[1]) * unit) if match and unit else None


class Meter:
    """Measures the storages that autograd keeps for backward during one forward, by block.

    Parameters, buffers and earlier tensors are not counted; a storage kept several times counts once.
    """

    def __init__(self, task: nn.Module, blocks: Mapping[str, nn.Module]):
        self.blocks = blocks
        self._sizes: dict[int, int] = {}
        self._kept: dict[str | None, set[int]] = {name: set() for name in [None, *blocks]}
        self._inputs: dict[str, set[int]] = {name: set() for name in blocks}
        self._inside: list[str] = []
        self._gathered: list[set[int | None]] = []
        "Parameters that a strategy gathers while a block runs: not activations either."
        self._alive: list[Any] = []
        self._own = {storage_key(local(tensor)) for tensor in [*task.parameters(), *task.buffers()]}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure a forward without recomputation, inside the `with`."""
        with ExitStack() as stack:
            for name, block in self.blocks.items():
                for handle in self._watch(name, block):
                    stack.callback(handle.remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))
            yield

    def _watch(self, name: str, block: nn.Module) -> Iterator[Any]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._inside.append(name)
            self._gathered.append({storage_key(local(parameter)) for parameter in module.parameters()} - self._own)
            self._own |= self._gathered[-1]
            for tensor in pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor):
                    self._note(tensor, self._inputs[name])

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._inside.pop()
            self._own -= self._gathered.pop()

        yield block.register_forward_pre_hook(enter, with_kwargs=True)
        yield block.register_forward_hook(leave, always_call=True)

    def _pack(self, tensor: Tensor) -> Tensor:
        # detached: an operation that saves its own output would keep itself alive
        detached = tensor.detach()
        self._note(detached, self._kept[self._inside[0] if self._inside else None])
        return detached

    def _note(self, tensor: Tensor, where: set[int]) -> None:
        key = storage_key(local(tensor))
        if key is not None and key not in self._own:
            self._alive.append(tensor.detach())  # kept alive, so that no other tensor gets its address
            self._sizes[key] = tensor.untyped_storage().nbytes()
            where.add(key)

    # -- choosing blocks ----------------------------------------------------------------------------------------------

    def kept(self, again: Iterable[str] = ()) -> int:
        """Return the bytes kept if the blocks `again` are recomputed: of those, only their inputs."""
        again = set(again)
        keys = set(self._kept[None])
        for name in self.blocks:
            keys |= self._inputs[name] if name in again and self._kept[name] else self._kept[name]
        return sum(self._sizes[key] for key in keys)

    def choose(self, limit: float, again: Iterable[str] = ()) -> list[str]:
        """Return few blocks that bring the kept bytes below `limit`, or all that help. `again` are included already."""
        picked = list(again)
        left = [name for name in self.blocks if name not in picked]
        now = self.kept(picked)
        while now > limit and left:
            best = min(left, key=lambda name: self.kept([*picked, name]))
            after = self.kept([*picked, best])
            if after >= now:
                break
            picked.append(best)
            left.remove(best)
            now = after
        return [name for name in self.blocks if name in picked]
