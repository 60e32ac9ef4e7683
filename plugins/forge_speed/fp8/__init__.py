"""Linear layers in float8."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import forge
from forge.errors import RecipeError, TaskError
from forge.util.patterns import MANY, as_list, covers, listed
from forge_speed.fp8.linear import TILE, install, remove

logger = logging.getLogger("forge")

AUTO, ALL = "auto", "all"
CAPABILITY = (8, 9)
"""The first compute capability with float8 units: Ada; Hopper is 9.0."""
SIZE, ROWS = 650, 700
"""What casts and scales cost a layer, in units of what float8 saves: SIZE over (inputs × outputs / (inputs + outputs))
for its inputs and gradients, and ROWS over the rows of a batch for its weight. On an H200 blocks of width 768 (384 to
614) gain nothing, their head of 50,304 tokens (756) a little, and width 2048 (1,024 and more) a fifth of the step.
ROWS is an estimate from bytes and operations."""


class FP8(forge.Plugin):
    """Compute the products of large linear layers in float8: faster steps and less memory on recent GPUs.

    The three products of an nn.Linear in training (forward, gradient of the input, gradient of the weight) run in
    float8 (`torch._scaled_mm`): all of them in e4m3. Each tensor has one scale, computed in
    every call from its largest value, so there is nothing to calibrate and nothing to save. Results are bfloat16.
    Weights and optimizer keep their type, and layers, parameters and checkpoints their names: a run can be resumed
    without the plugin, and the other way round.

    When to use it: for models of width 2048 and more, with `compile` and `amp`, on NVIDIA GPUs of compute capability
    8.9 or newer (Ada, Hopper, Blackwell); older ones are refused. Without `compile` every cast is a pass over memory of
    its own, which costs more than float8 saves. On other devices everything runs as written, and the log says so.

    `layers: auto` takes the layers that are large enough to gain: inputs × outputs / (inputs + outputs) is at least
    650, and a batch has enough rows (a few thousand; the wider the layer, the fewer). `all` takes every layer whose
    sizes are multiples of 16, and patterns of names take those that you name. Only nn.Linear itself is taken: not
    subclasses, and no `F.linear` with a weight of your own. A head that shares the embedding's weight is taken if it is
    an nn.Linear. A call with a number of rows that is no multiple of 16, such as the last batch of an epoch, runs as
    written.

    Evaluation runs as written: metrics are those of the weights that are exported, without float8. A NaN or an infinity
    in a tensor makes the whole product NaN, so that guards see it. Gradients of gradients are not possible.

    What you see: the log lists the layers. Losses differ from bfloat16's by noise; compare a short run of your own.

    Together with: under `amp` in bf16 results are bfloat16, as without the plugin. Without `amp`, results of float32
    layers are rounded to bfloat16 and returned as float32. A loss scaler (fp16), `tensor_parallel`, which splits
    layers, and `qat` are refused. `kernels` leaves layers in float8 alone. With `fsdp` a weight is cast after it is
    gathered, in full.

    ::

        forge fit quickstart -p fp8
        forge fit quickstart -p fp8 fp8.layers=all fp8.leave_out=net.7
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        layers: str | list[str] = AUTO
        "Which linear layers: auto (those large enough to gain), all, or patterns of names, such as 'blocks.*'."
        leave_out: str | list[str] = field(default_factory=list)
        "Patterns of layers to leave as they are."

    config: Config
    provides = ("float8",)
    conflicts = {
        "grad_scaler": "Use amp.dtype=bf16, which needs none.",
        "split_layers": "Use fsdp alone, or leave fp8 out.",
        "fake_quantization": "Both replace the arithmetic of linear layers: use one of them.",
    }
    capturable = True

    def __init__(self, *first: str | list[str], **values: Any):
        super().__init__(*first, **values)
        if not as_list(self.config.layers):
            raise RecipeError("fp8.layers is an empty list. Name some layers, or write auto or all.")
        self._layers: dict[str, nn.Linear] = {}

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, phase: str) -> None:
        if phase != "surgery" or trainer.verb != "fit":
            return
        self._layers = {}
        chosen = self._choose(trainer.task)  # names are refused on any device
        device = trainer.env.device
        if not acts_on(device):
            logger.info("fp8: everything runs as written: float8 runs on CUDA, and this run is on %s.", device.type)
            return
        if not chosen:
            logger.info(
                "fp8: everything runs as written: no linear layer of %s is large enough to gain. fp8.layers=all takes "
                "all whose sizes are multiples of %d.",
                type(trainer.task).__name__,
                TILE,
            )
            return
        self._layers, trainer.env.computes_in[self.name] = chosen, "fp8"
        for layer in chosen.values():
            install(layer, least_rows(layer) if self.config.layers == AUTO else TILE)
        logger.info("fp8 computes %d linear layers in float8: %s.", len(chosen), listed(chosen, MANY))
        if device.type == "cuda" and not any("compile" in plugin.provides for plugin in trainer.stack):
            logger.warning("fp8 without compile is slower than bfloat16: its casts are not fused. Add -p compile.")

    @forge.hookimpl
    def forge_end(self) -> None:
        for layer in self._layers.values():
            remove(layer)
        self._layers = {}

    # -- which layers -------------------------------------------------------------------------------------------------

    def _choose(self, task: nn.Module) -> dict[str, nn.Linear]:
        layers, config = linear_layers(task), self.config
        left_out = as_list(config.leave_out)
        _refuse_unknown(left_out, layers, "fp8.leave_out", task)
        there = {name: layer for name, layer in layers.items() if not covers(left_out, [name])}
        if config.layers == AUTO:
            return {name: layer for name, layer in there.items() if fits(layer) and gains(layer)}
        if config.layers == ALL:
            found = {name: layer for name, layer in there.items() if fits(layer)}
            if not found:
                raise TaskError(
                    f"fp8: {type(task).__name__} has no nn.Linear {'but fp8.leave_out ' if left_out else ''}whose "
                    f"sizes are multiples of {TILE}. Remove fp8."
                )
            return found
        patterns = as_list(config.layers)
        _refuse_unknown(patterns, layers, "fp8.layers", task)
        named = {name: layer for name, layer in there.items() if covers(patterns, [name])}
        for name, layer in named.items():
            if not fits(layer):
                raise RecipeError(
                    f"fp8.layers: {name} is {layer.in_features} × {layer.out_features} in {_name(layer.weight.dtype)}; "
                    f"float8 needs multiples of {TILE} and weights in float32 or bfloat16. Exclude it: "
                    f"fp8.leave_out={name}"
                )
        return named


def acts_on(device: torch.device) -> bool:
    """Whether layers can be computed in float8 on a device; refuse a GPU that is too old."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        raise RecipeError(
            f"fp8: {torch.cuda.get_device_name(device)} has no float8 units: its compute capability is {found[0]}."
            f"{found[1]}, and {CAPABILITY[0]}.{CAPABILITY[1]} is needed. Leave fp8 out: -p no:fp8"
        )
    return True


def linear_layers(task: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers by name: not those of a subclass or with a forward of their own, which may compute
    something else."""
    modules = task.named_modules()
    return {name: module for name, module in modules if type(module) is nn.Linear and "forward" not in vars(module)}


def fits(layer: nn.Linear) -> bool:
    """Whether float8 products can take the weight."""
    sizes = layer.in_features % TILE == 0 and layer.out_features % TILE == 0 and layer.weight.numel() > 0
    return sizes and layer.weight.dtype in (torch.float32, torch.bfloat16)


def gains(layer: nn.Linear) -> bool:
    """Whether a layer is large enough to gain, with any number of rows."""
    return _overhead(layer) < 1


def least_rows(layer: nn.Linear) -> int:
    """Return the number of rows from which a layer that can gain does."""
    return math.ceil(ROWS / (1 - _overhead(layer)))


def _overhead(layer: nn.Linear) -> float:
    """Return what casting inputs and gradients costs, as a share of what float8 saves."""
    return SIZE * (layer.in_features + layer.out_features) / (layer.in_features * layer.out_features)


def _refuse_unknown(patterns: Iterable[str], layers: dict[str, nn.Linear], option: str, task: nn.Module) -> None:
    for pattern in patterns:
        if not covers([pattern], layers):
            raise RecipeError(
                f"{option}: {pattern!r} matches no nn.Linear of {type(task).__name__}. They are "
                f"{listed(layers, MANY) or 'none'}."
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
