"""FLOPs of an update, by torch's formulas."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

import forge
import forge.contract.step
from forge.contract.task import TaskModule
from forge.rng import RNGState
from forge.snapshot.copies import without_hooks
from forge.torch_internals import TorchDispatchMode, fake_tensors, pytree
from forge.util.frames import is_library
from forge.util.frozen import every_module
from forge.util.text import short_path
from forge_plugins import torch_internals as internals
from forge_plugins.spans.peaks import as_computed, peak_of

logger = logging.getLogger("forge")

TORCHS_OWN = ("aten", "prim", "prims", "profiler", "debugprims", "rngprims", "_c10d_functional", "c10d")
"""Namespaces whose operations cost little, unless their names say otherwise."""
DEAR = re.compile(r"attention|conv|rnn|lstm|gru|mm$|linear|fft")
"""Names of torch's own operations that compute much; not all of them have a formula."""


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Counting(TorchDispatchMode):
    """Counts FLOPs while operations run unchanged, with the formulas of torch's flop counter.

    torch's own FlopCounterMode does not run Triton kernels, places hooks on every module to attribute FLOPs, and does
    not report the dtype of a product.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.by_dtype: Counter[str] = Counter()
        "FLOPs by the type in which they are computed."
        self.unknown: set[str] = set()
        "Operations without a formula."
        self.calls = 0
        self.reads: Counter[str] = Counter()
        "Values that lines of the user's read, as `.item()` does, by line."

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", func)
        self.calls += 1
        if torch.Tag.data_dependent_output in getattr(func, "tags", ()):
            self._read(sys._getframe(1))
        if packet in flop_registry:
            self._add(packet, args, kwargs or {}, out)
        elif getattr(func, "namespace", "") not in TORCHS_OWN or DEAR.search(str(packet)):
            self.unknown.add(str(packet))
        return out

    def _read(self, frame: FrameType | None) -> None:
        """Count a value that is read, if it is the user's code that reads it: that is above what runs the phases."""
        while frame is not None and is_library(frame.f_code.co_filename):
            frame = None if frame.f_code.co_filename == forge.contract.step.__file__ else frame.f_back
        if frame is not None:
            self.reads[f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"] += 1

    def _add(self, packet: Any, args: Any, kwargs: Any, out: Any) -> None:
        try:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
        except Exception:  # a formula that fails must not fail the run
            self.unknown.add(str(packet))
            return
        first = next(leaf for leaf in pytree.tree_leaves((args, out)) if isinstance(leaf, Tensor))
        self.by_dtype[as_computed(first.dtype, first.device, "conv" in str(packet))] += flops


class FlopCount:
    """Counts the second update of a run; the first may still compile. Inside compiled code nothing can be counted, so
    forward and backward of a micro-batch run once on a copy of the task without values."""

    def __init__(self, device: torch.device, peak: float | None = None):
        self._counting, self._samples = Counting(), 0.0
        self._graphs = graphs_compiled()
        self._device, self._given = device, peak
        self.first = math.inf
        "The first update."
        self.peak: float | None = None
        "The device's peak in FLOP/s, once all is counted and where it is known."
        self.told = ""
        "What was counted."

    @property
    def per_sample(self) -> float | None:
        counted = self._counting.by_dtype.total()
        return counted / self._samples if counted and self._samples else None

    @property
    def calls(self) -> int | None:
        """Operators of an update; None if its parts are compiled, or unknown."""
        return self._counting.calls if self._samples else None

    @property
    def reads(self) -> Mapping[str, int]:
        """Values that lines of the user's read in an update."""
        return self._counting.reads

    def turn(self, step: forge.Step) -> AbstractContextManager[Any] | None:
        """Return what to run one optimizer's turn of an update in; None once all is counted."""
        self.first = min(self.first, step.index)
        if step.index == self.first:
            return nullcontext()
        if step.index > self.first + 1:
            self.peak, self.told = self._find_peak()
            return None
        if is_compiled(step.trainer, self._graphs):
            self._probe(step)
            return nullcontext()
        self._samples = step.samples
        return self._counting

    def _probe(self, step: forge.Step) -> None:
        trainer = step.trainer
        providers = [plugin for plugin in trainer.stack if "autocast" in plugin.provides]
        try:
            autocast = DTYPES.get(getattr(providers[0], "dtype", "")) if providers else None
            self._counting, self._samples = probe(step, autocast), step.samples / len(step.window)
        except Exception as error:  # for example a task that needs real numbers
            said = str(error).strip().partition("\n")[0]
            text = (
                "spans: the FLOPs of %s are unknown: it is compiled, where nothing can be counted, and a copy of the "
            )
            text += "task with fake tensors does not run (%s: %s)."
            logger.warning(text, type(trainer.task).__name__, type(error).__name__, said)

    def _find_peak(self) -> tuple[float | None, str]:
        """Return the device's peak in FLOP/s, and a text of what was counted, the formula of MFU, and what was not."""
        kinds = self._counting.by_dtype.most_common()
        if not kinds or self.per_sample is None:
            return None, ""
        dtype, given, device = kinds[0][0], self._given, self._device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
        peak = given if given is not None else peak_of(name, dtype)
        shares = ", ".join(f"{flops / self._counting.by_dtype.total():.0%} {kind}" for kind, flops in kinds if flops)
        lines = [f"{self.per_sample / 1e9:,.4g} GFLOP for a sample ({shares})."]
        if peak is not None:
            source = "spans.peak" if given is not None else f"the data sheet's dense {dtype} peak of {name}"
            lines.append(f"MFU = FLOP/s ÷ {peak:,.6g} TFLOP/s, {source}.")
        else:
            lines.append(f"The {dtype} peak of {name} is unknown, so MFU is not logged. Set spans.peak=TFLOP/s.")
        if self._counting.unknown:
            lines.append(f"Not counted, because they have no formula: {', '.join(sorted(self._counting.unknown))}.")
        return None if peak is None else peak * 1e12, " ".join(lines)

    def least_seconds(self, trainer: forge.Run) -> float | None:
        """Return the seconds that an update takes a device at its peak; None where that is unknown."""
        samples = trainer.progress.sample / max(trainer.progress.update, 1)
        return None if self.peak is None or self.per_sample is None else self.per_sample * samples / self.peak


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


def probe(step: forge.Step, autocast: torch.dtype | None) -> Counting:
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
        return counting
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
