"""FLOPs of a step, by torch's formulas."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

import forge
from forge.contract.task import TaskModule
from forge.rng import RNGState
from forge.snapshot.copies import without_hooks
from forge.torch_internals import TorchDispatchMode, fake_tensors, pytree
from forge.util.frozen import every_module
from forge_plugins import torch_internals as internals
from forge_plugins.throughput.peaks import as_computed

TORCHS_OWN = ("aten", "prim", "prims", "profiler", "debugprims", "rngprims", "_c10d_functional", "c10d")
"""Namespaces whose operations cost little, unless their names say otherwise."""
DEAR = re.compile(r"attention|conv|rnn|lstm|gru|mm$|linear|fft")
"""Names of torch's own operations that compute much; not all of them have a formula."""


@dataclass(slots=True)
class Count:
    """Counted FLOPs."""

    by_dtype: Counter[str] = field(default_factory=Counter)
    "FLOPs by dtype."
    unknown: Counter[str] = field(default_factory=Counter)
    "Operations without a formula, with the number of calls."

    @property
    def total(self) -> int:
        return sum(self.by_dtype.values())

    @property
    def dtype(self) -> str | None:
        """The dtype of most FLOPs."""
        return self.by_dtype.most_common(1)[0][0] if self.by_dtype else None


class Counting(TorchDispatchMode):
    """Counts FLOPs while operations run unchanged, with the formulas of torch's flop counter.

    torch's own FlopCounterMode does not run Triton kernels, places hooks on every module to attribute FLOPs, and does
    not report the dtype of a product.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", func)
        if packet in flop_registry:
            self._add(packet, args, kwargs or {}, out)
        elif getattr(func, "namespace", "") not in TORCHS_OWN or DEAR.search(str(packet)):
            self.count.unknown[str(packet)] += 1
        return out

    def _add(self, packet: Any, args: Any, kwargs: Any, out: Any) -> None:
        try:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
        except Exception:  # a formula that fails must not fail the run
            self.count.unknown[str(packet)] += 1
            return
        first = next(leaf for leaf in pytree.tree_leaves((args, out)) if isinstance(leaf, Tensor))
        self.count.by_dtype[as_computed(first.dtype, first.device, "conv" in str(packet))] += flops


def is_compiled(trainer: forge.Run, graphs_before: int) -> bool:
    """Whether parts of the model are compiled: a dispatch mode around them would run them uncompiled."""
    marked = any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in trainer.model.modules())
    return marked or graphs_compiled() > graphs_before


def graphs_compiled() -> int:
    """Return the number of graphs compiled by this process."""
    counted = internals.compile_counters
    return 0 if counted is None else int(counted["stats"]["unique_graphs"])


# ---------------------------------------------------------------------------------------------------------------------
# Without running anything


def probe(step: forge.Step, autocast: torch.dtype | None) -> Count:
    """Count forward and backward of the window's first micro-batch on a copy of the task with fake tensors.

    The run is unchanged: every tensor in the copy is fake, and a real one raises.
    """
    trainer = step.trainer
    device, rng = trainer.env.device, RNGState.capture(trainer.env.device)
    try:
        with torch.compiler.set_stance("force_eager"):
            fake = fake_tensors.FakeTensorMode()
            task = _hollow(trainer.task, fake)
            batch = pytree.tree_map_only(Tensor, fake.from_tensor, step.window[0])
            with fake, Counting() as counting:
                batch = trainer.env.move(batch)
                with torch.autocast(device.type, autocast) if autocast is not None else nullcontext():
                    output = task.training_step(batch) if step.name is None else task.training_step(batch, step.name)  # pyright: ignore[reportCallIssue]
                loss = output if isinstance(output, Tensor) else output["loss"]
                loss.backward()
        return counting.count
    finally:
        rng.restore(device)


def _hollow(task: TaskModule, fake: fake_tensors.FakeTensorMode) -> TaskModule:
    """Return a copy of the task with fake tensors, without hooks and uncompiled."""
    memo: dict[int, Any] = {}
    parts = list(every_module(task))
    for tensor in (tensor for part in parts for tensor in (*part.parameters(False), *part.buffers(False))):
        hollow = fake.from_tensor(tensor.detach())
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(hollow, tensor.requires_grad) if is_parameter else hollow
    copied = without_hooks(task, memo)
    for module in every_module(copied):
        vars(module).pop("_compiled_call_impl", None)
    return copied
