"""Compare one batch eager and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import forge
from forge import torch_internals as internals
from forge.diagnose.checks import check_training_output
from forge.optim.sharded import local
from forge.snapshot.sandbox import without_side_effects
from forge.twin.compare import ROUNDING, differences
from forge.twin.record import Record
from forge.util.tensors import tensors_in
from forge_plugins.compile.regions import Regions

MINIFIER = "TORCHDYNAMO_REPRO_AFTER=aot TORCHDYNAMO_REPRO_LEVEL=4"
"""What makes torch's minifier look for the smallest graph that computes something else than eager."""


def compare(step: forge.Step, regions: Regions, options: Mapping[str, Any]) -> tuple[bool, str]:
    """Run the first batch both ways, in training mode and with the same random numbers, without side effects.

    Return whether they agree, and a sentence. It is compiled for this alone, without CUDA graphs, and with torch's
    random numbers instead of the backend's, so that dropout is the same.
    """
    options, dtypes = comparable(options), {parameter.dtype for parameter in step.trainer.task.parameters()}

    def look(module: nn.Module, args: Any, output: Any) -> None:
        dtypes.update(tensor.dtype for tensor in tensors_in(output))

    with without_side_effects(step.trainer), torch_random():
        batch = step.trainer.hooks.forge_prepare_batch(step, step.window[0])
        with regions.instead(), register_module_forward_hook(look):
            eager = _recorded(step, batch)
        with regions.instead(regions.make(options)):
            compiled = _recorded(step, batch)
    dtype = max(dtypes & ROUNDING.keys(), key=lambda each: ROUNDING[each], default=torch.float32)
    return _judged(compiled, eager, dtype, tolerance_for(dtype, step.trainer.env.device))


def _judged(compiled: Record, eager: Record, dtype: torch.dtype, tolerance: float) -> tuple[bool, str]:
    found = differences(compiled.marks, eager.marks, tolerance)
    worst = max(found, key=lambda each: each.distance.relative, default=None)
    if worst is None:
        return True, "compiled and eager agree on the first batch bit for bit."
    agrees = worst.distance.relative <= tolerance
    return agrees, (
        f"compiled and eager {'agree' if agrees else 'disagree'} on the first batch: they differ most {worst}, "
        f"{worst.distance.relative:.3g} of its size; {tolerance:g} is allowed for {str(dtype).removeprefix('torch.')}."
        + ("" if agrees else f" torch's own minifier looks for the operations: run again with {MINIFIER}.")
    )


def tolerance_for(dtype: torch.dtype, device: torch.device) -> float:
    """Return the allowed difference of two tensors, relative to their size."""
    if dtype is torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return ROUNDING[torch.float16]  # TF32 has the mantissa of float16
    return ROUNDING.get(dtype, ROUNDING[torch.bfloat16])


def comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the same kernels without CUDA graphs, which would have to be recorded first."""
    modes = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
    mode = options.get("mode")
    return {**options, "mode": modes.get(mode, mode)} if isinstance(mode, str) else dict(options)


def torch_random() -> AbstractContextManager[Any]:
    """Make code compiled inside the `with` draw the random numbers of eager code."""
    try:
        return internals.inductor_config.patch(fallback_random=True)
    except AttributeError:
        return nullcontext()


def _recorded(step: forge.Step, batch: Any) -> Record:
    """Record loss and gradients by name, not in `.grad`; random state and buffers are restored."""
    trainer, own = step.trainer, {id(parameter) for parameter in step.parameters()}
    named = {n: p for n, p in trainer.task.named_parameters() if id(p) in own and p.requires_grad}
    record = Record(keep=True)
    with without_side_effects(trainer), torch.enable_grad():
        output = trainer.hooks.forge_forward(step, batch)
        check_training_output(output, trainer.task)
        loss = output if isinstance(output, Tensor) else output["loss"]
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
    record.mark("the loss", loss)
    record.mark("", dict(zip(named, map(local, gradients), strict=True)), kind="the gradients")
    return record
