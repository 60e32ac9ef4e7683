"""One recomputed block: its forward, and the buffers that a forward changes."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Forward = Callable[..., Any]


def install(block: nn.Module) -> None:
    """Make the block drop its activations; `remove` restores its forward."""
    own = vars(block).get("forward")
    forward = type(block).forward if own is None else own
    if isinstance(own, MethodType) and own.__self__ is block:
        forward = own.__func__
    elif own is not None:
        forward = functools.partial(_without_self, own)
    # a bound method: a copy of the block gets one bound to the copy
    vars(block)["forward"] = MethodType(rematerialised(forward), block)


def remove(block: nn.Module, own: Any) -> None:
    """Restore the forward that the block had in its `__dict__`, if any; not where its owner has removed it since."""
    installed = vars(block).pop("forward", None)
    _known.pop(block, None)
    if own is not None and installed is not None:
        vars(block)["forward"] = own


@functools.lru_cache(maxsize=64)
def rematerialised(forward: Forward) -> Forward:
    """Return `forward`, recomputed in backward. Cached by function, so that equal blocks compile equally."""

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():  # a compiled graph writes buffers once, even if it recomputes
            return checkpoint(forward, self, *args, use_reentrant=False, **kwargs)
        return checkpoint(
            functools.partial(_with_fresh_caches, forward, self, **kwargs),  # checkpoint has its own keywords
            *args,
            use_reentrant=False,
            preserve_rng_state=True,
            determinism_check="default",
            context_fn=functools.partial(_moving(self).contexts, self.training),
        )

    return run


def _with_fresh_caches(forward: Forward, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Give a block copies of the caches of keys and values that models of transformers pass, in training too: what the
    first forward adds would be there in the second."""
    made = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
    return forward(self, *(_fresh(arg, made) for arg in args), **{k: _fresh(v, made) for k, v in kwargs.items()})


def _fresh(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        return value
    copied = copy.copy(value)
    for name, held in vars(value).items():
        layers = [copy.copy(layer) for layer in held] if type(held) is list else None
        vars(copied)[name] = layers if layers is not None else dict(held) if type(held) is dict else _fresh(held, kind)
    return copied


def _without_self(own: Forward, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Buffers


@dataclass(slots=True)
class Moving:
    """The buffers that a block's forward changes, such as BatchNorm's statistics.

    The second run uses copies of the buffers before the first, so that it computes the same, and the block's own
    buffers change once. The first forward in each combination of module modes shows which buffers change.
    """

    inside: list[nn.Module]
    "The modules in the block."
    buffers: list[tuple[dict[str, Tensor | None], str]]
    changed: dict[tuple[bool, ...], list[int]] = field(default_factory=dict)
    "The buffers that change, by the training flags of the modules."

    def contexts(self, training: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts for the first and the second run of one call."""
        if not self.buffers:
            return nullcontext(), nullcontext()
        modes = (training, *[module.training for module in self.inside])
        known = self.changed.get(modes)
        if known == []:
            return nullcontext(), nullcontext()
        found = {i: self._now(i).clone() for i in (range(len(self.buffers)) if known is None else known)}
        return (self._learn(modes, found) if known is None else nullcontext()), self._on_copies(found)

    def _now(self, i: int) -> Tensor:
        owner, name = self.buffers[i]
        buffer = owner[name]
        assert buffer is not None
        return buffer.detach()

    @contextmanager
    def _learn(self, modes: tuple[bool, ...], found: dict[int, Tensor]) -> Iterator[None]:
        yield
        # by value: kernels write BatchNorm's statistics without changing the tensor's version
        still = [i for i, value in found.items() if torch.equal(self._now(i), value)]
        for i in still:
            del found[i]
        self.changed[modes] = list(found)

    @contextmanager
    def _on_copies(self, found: dict[int, Tensor]) -> Iterator[None]:
        own = {i: self.buffers[i][0][self.buffers[i][1]] for i in found}
        for i, value in found.items():
            owner, name = self.buffers[i]
            owner[name] = value.clone()
        try:
            yield
        finally:
            for i, buffer in own.items():
                owner, name = self.buffers[i]
                owner[name] = buffer


_known: WeakKeyDictionary[nn.Module, Moving] = WeakKeyDictionary()


def _moving(block: nn.Module) -> Moving:
    moving = _known.get(block)
    if moving is None:
        _, *inside = block.modules()  # without the block itself, which must not be kept alive here
        modules = [block, *inside]
        places = [(m._buffers, name) for m in modules for name, buffer in m._buffers.items() if buffer is not None]
        moving = _known[block] = Moving(inside, places)
    return moving
