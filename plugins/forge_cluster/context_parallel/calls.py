"""Calls of torch's functions that see more than one position: attention, and losses that are means over positions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from forge.distributed.positions import set_slice
from forge.errors import TaskError
from forge_cluster.context_parallel.ring import Ring
from forge_cluster.torch_internals import without_function_modes

F = TypeVar("F", bound=Callable[..., Any])
DROPOUTS = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
}


class SequenceCalls:
    """While a task computes a slice, attention goes over the slices of all ranks, and a mean of cross-entropies over
    the counted positions of all of them.

    Functions are replaced for the length of a run in torch.nn.functional and in modules that imported them, because a
    backward pass calls them too, under activation checkpointing. A mode sees them in a forward under any name. It costs
    3 % of a small step, so a task that has called none by another name is trusted, until it makes another number of
    calls, and but for every pass whose number is a power of two.
    """

    def __init__(self, ring: Ring, counts_items: bool, positions_by_arange: bool):
        self.ring, self.counts_items = ring, counts_items
        self.attentions = self.losses = 0
        self.compiled = False
        "Whether torch.compile traces the task: then without the mode."
        self.own: Tensor | None = None
        "The positions of the slice that is computed now; None: whole sequences."
        self._passes, self._known = 0, set[tuple[int, int]]()
        "Forward passes so far, and the numbers of attentions and losses that they made under the mode."
        self._by_other_names, self._trusted, self._unknown = positions_by_arange, False, False
        """Whether the task calls functions by names that are not replaced; a pass ran without the mode; it made a
        number of calls that is not known."""
        self._undo = ExitStack()
        self.replaced = {
            functional.scaled_dot_product_attention: self.attention,
            functional.cross_entropy: self._mean_of(functional.cross_entropy),
            functional.nll_loss: self._mean_of(functional.nll_loss),
        }
        if positions_by_arange:
            self.replaced[torch.arange] = self.arange

    # -- a run --------------------------------------------------------------------------------------------------------

    def install(self, compiled: bool) -> None:
        """Replace the functions until `remove`."""
        self.compiled = compiled
        for original, ours in self.replaced.items():
            if original is not torch.arange:
                ours = torch.compiler.disable(ours) if compiled else ours
                for module in _holders(original):
                    setattr(module, original.__name__, ours)
                    self._undo.callback(setattr, module, original.__name__, original)
        # nn.MultiheadAttention evaluates by a kernel of its own, which would see one slice
        self._undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)

    def remove(self) -> None:
        self.enter(None)
        self._undo.close()

    # -- a slice ------------------------------------------------------------------------------------------------------

    def enter(self, own: Tensor | None) -> None:
        """Begin to compute a slice with these positions; None: whole sequences."""
        self.own = own
        set_slice(own)

    @contextmanager
    def seen(self) -> Iterator[None]:
        """See calls of the functions under any name, in a forward pass."""
        if self.compiled:
            yield
            return
        before, is_round = (self.attentions, self.losses), not self._passes & (self._passes - 1)
        mode = CallMode(self.replaced) if self._by_other_names or self._unknown or is_round else None
        self._passes += 1
        with mode or nullcontext():
            yield
        made = self.attentions - before[0], self.losses - before[1]
        self._unknown = mode is None and made not in self._known
        if mode is None:
            self._trusted = True
            return
        self._known.add(made)
        if mode.called and self._trusted:
            raise TaskError(
                "context_parallel: the step calls attention, or a loss, by a name that it did not call before, such as "
                "a function that was kept in an attribute: earlier steps may have computed slices alone. Call "
                "torch.nn.functional.scaled_dot_product_attention and cross_entropy by these names."
            )
        self._by_other_names |= mode.called

    # -- the functions ------------------------------------------------------------------------------------------------

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`scaled_dot_product_attention` over the slices of all ranks."""
        own = self.own
        if own is None:
            return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        self.attentions += 1
        self._refuse(query, key, value, attn_mask, dropout_p, own.shape[0])
        with without_function_modes():  # what the ring calls is its own
            return self.ring.attend(query, key, value, is_causal, scale)

    def _refuse(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float, length: int) -> None:
        if mask is not None:
            raise TaskError(
                "context_parallel: the model passes a mask to scaled_dot_product_attention, which a ring of slices "
                "cannot apply. Use causal or full attention without one (is_causal=True; no padding, no sliding window)"
                + (
                    ". transformers makes one where positions jump, as between the two halves of a slice: set "
                    "context_parallel.balance=false."
                    if self.ring.balance
                    else "."
                )
            )
        if dropout:
            raise TaskError(
                f"context_parallel: the model drops attention weights (dropout_p={dropout:g}), which a ring of slices "
                "cannot repeat in its backward pass. Set the dropout of attention to 0; dropout elsewhere works."
            )
        lengths = query.shape[-2], key.shape[-2]
        if lengths != (length, length):
            raise TaskError(
                f"context_parallel: attention of {lengths[0]} queries over {lengths[1]} keys, where the rank's slice "
                f"of the sequence has {length} positions. Only self-attention along the sequence can be divided: no "
                "tokens that the model adds, no cross-attention, no attention along another dimension."
            )
        if value.shape[-1] != query.shape[-1]:
            raise TaskError(
                f"context_parallel: queries are {query.shape[-1]} wide and values {value.shape[-1]}; the ring needs "
                "both alike."
            )

    def arange(self, *args: Any, **kwargs: Any) -> Tensor:
        """`torch.arange` over as many numbers as the slice has positions: those positions."""
        own, made = self.own, torch.arange(*args, **kwargs)
        first = kwargs.get("start", args[0] if len(args) > 1 else 0)
        step = kwargs.get("step", args[2] if len(args) > 2 else 1)
        if own is None or made.shape != own.shape or step != 1:
            return made
        return own.to(made.device, made.dtype) + first

    def _mean_of(self, original: F) -> F:
        """Return the loss as a mean over the counted targets of all slices, times the number of slices: the mean over
        ranks is then that of one process, wherever the targets that count are."""

        def mean(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            given = dict(zip(ARGUMENTS[original.__name__], args, strict=False)) | kwargs
            other = given.get("size_average") is not None or given.get("reduce") is not None
            is_mean = given.get("reduction", "mean") == "mean" and not other and not target.is_floating_point()
            if self.own is None or not is_mean:
                with without_function_modes():
                    return original(input, target, **given)
            self.losses += 1
            with without_function_modes():
                total = original(input, target, **{**given, "reduction": "sum"})
                count = _counted(target, given.get("weight"), given.get("ignore_index", -100)).to(total.dtype)
                if self.counts_items:  # the task's num_items weighs the slice
                    return total / torch.where(count == 0, 1, count)
                dist.all_reduce(count, group=self.ring.group)
                return total * (dist.get_world_size(self.ring.group) / count)

        return mean  # pyright: ignore[reportReturnType]


ARGUMENTS = {
    "cross_entropy": ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"),
    "nll_loss": ("weight", "size_average", "ignore_index", "reduce", "reduction"),
}
_attention = functional.scaled_dot_product_attention


def _holders(original: Any) -> list[Any]:
    """Return torch.nn.functional, and modules outside of torch that have imported the function."""
    name, found = original.__name__, [functional]
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] != "torch" and getattr(module, "__dict__", {}).get(name) is original:
            found.append(module)
    return found


@torch.no_grad()
def _counted(target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """Return the number of targets that count, or the sum of their weights."""
    counts = target != ignored
    if weight is None:
        return counts.sum()
    return (weight[target.masked_fill(~counts, 0)] * counts).sum()


class CallMode(TorchFunctionMode):
    """Calls other functions in place of some."""

    def __init__(self, replaced: dict[Any, Callable[..., Any]]):
        super().__init__()
        self._replaced_calls = replaced
        self.called = False
        "Whether any of them was called."

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = self._replaced_calls.get(func)
        if ours is not None:
            self.called, func = True, ours
        return func(*args, **(kwargs or {}))


class WithoutDropout(TorchFunctionMode):
    """Dropout returns its input, so that two runs can be compared."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DROPOUTS:
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))
