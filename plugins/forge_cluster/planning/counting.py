"""Counting: the floating-point operations, bytes and calls of a measured step, by phase, and what its blocks take."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from forge.planning.blocks import repeated
from forge.planning.tracker import Tracker
from forge.torch_internals import TorchDispatchMode, fake_tensors, pytree

FREE = ("empty", "detach", "_unsafe_view", "alias", "lift_fresh", "new_empty")
"""Operations that move no bytes; views are recognised by their schema."""
ROWS = ("embedding", "embedding_dense_backward", "gather", "index_select")
"""Operations that read a few rows of a large table: only what they write counts, twice."""
DEVICE = torch.ops.prim.device.default
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


class OpCounter(TorchDispatchMode):
    """Counts while operations run unchanged. `found` has, by name and phase, sums over one update."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = FORWARD
        self.found: dict[str, float] = defaultdict(float)
        self.hidden = self.key_values = 0.0
        "Bytes that one block hands to the next, and of the keys and values of one attention."
        self.loss = self.narrow = 0.0
        "Bytes of a log-softmax, the largest, and of its input before a cast to a wider type; 0 without a cast."
        self.positions: int | None = None
        self.heads: int | None = None
        self.blocks = 0
        self._depth = 0
        self._widened = 0, 0.0
        "Number of elements and former bytes of the tensor that was cast to a wider type last."

    def watch(self, task: nn.Module, tracker: Tracker) -> None:
        """Note what goes on inside the task's repeated blocks."""
        blocks = repeated(task)
        self.blocks = len(blocks)
        tracker.in_blocks = False
        for block in blocks:
            before: list[float] = []

            def enter(*_: Any, before: list[float] = before) -> None:
                self._depth += 1
                if self.phase == FORWARD:
                    tracker.in_blocks = False
                before.append(tracker.live)

            def leave(_module: Any, _inputs: Any, output: Any, before: list[float] = before) -> None:
                self._depth -= 1
                kept = tracker.live - before.pop()
                if self.phase == FORWARD:
                    self.found["block activations"] += max(0.0, kept)
                    self._note(output, tracker)

            block.register_forward_pre_hook(enter)
            block.register_forward_hook(leave)

    def forget(self) -> None:
        """Start the next update."""
        self.found.clear()

    def _note(self, output: Any, tracker: Tracker) -> None:
        def reached(_gradient: Tensor) -> None:
            tracker.in_blocks = True

        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if tensors:
            self.hidden = float(tensors[0].numel() * tensors[0].element_size())
            self.positions = tensors[0].shape[1] if tensors[0].dim() == 3 else None
            if tensors[0].requires_grad:
                tensors[0].register_hook(reached)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], fake_tensors.FakeTensor):  # most calls: the tracker asks each tensor
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", func)
        name = str(packet).rpartition(".")[2]
        if func.namespace == "prim" or getattr(func, "is_view", False) or name.startswith(FREE):
            return out
        self.found[f"ops {self.phase}"] += 1
        if name in ("_to_copy", "_log_softmax"):
            self._watch_loss(name, args[0], out)
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
            kind = "attention" if "attention" in name else "matmul"
            if kind == "attention" and _is_causal(func, args, kwargs or {}):
                flops /= 2  # torch's formula counts the whole square
            self.found[f"{kind} {self.phase}"] += flops
            if self._depth and self.phase == FORWARD:
                self.found["block flops"] += flops
            if kind == "attention" and self.phase == FORWARD:
                query, key = args[0], args[1]
                self.heads = int(query.shape[1])
                self.key_values = 2.0 * key.numel() * key.element_size()
        else:
            written = _bytes(out) or _bytes(_changed(func, args, kwargs or {}))
            self.found[f"bytes {self.phase}"] += 2 * written if name in ROWS else written + _bytes((args, kwargs))
        return out

    def _watch_loss(self, name: str, given: Tensor, out: Tensor) -> None:
        if name == "_to_copy":
            if out.element_size() > given.element_size():
                self._widened = out.numel(), _bytes(given)
        elif _bytes(out) > self.loss:
            count, narrow = self._widened
            self.loss, self.narrow = _bytes(out), narrow if count == out.numel() else 0.0


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    return bool(_named(func, args, kwargs).get("is_causal"))


def _changed(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation changes, such as an optimizer's, which returns nothing."""
    written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    return [value for name, value in _named(func, args, kwargs).items() if name in written]


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs


def _bytes(tree: Any) -> float:
    return float(
        sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    )
