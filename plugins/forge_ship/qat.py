"""Quantisation-aware training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge.errors import CheckpointError, RecipeError, TaskError
from forge.torch_internals import foreach_copy_
from forge.util.patterns import as_list, covers, listed
from forge_ship.int8 import LARGEST, STEPS, activation_grid, weight_scale

logger = logging.getLogger("forge")

RANGE = "_qat_range"
"""The buffer of a layer, not saved with the task: least and largest input, and the number of batches seen."""
SEEN = "qat_seen"
"""The attribute of a layer that says whether its range holds something; a layer without one is not rounded."""
MOMENTUM = 0.01
"""Share of the way that a range moves towards the range of each batch."""


class QAT(forge.Plugin):
    """Train with the rounding of 8-bit integers, so that the exported int8 model is as good as the trained one.

    Inputs and weights of every nn.Linear, nn.Conv1d, nn.Conv2d and nn.Conv3d are rounded to the grid of int8 in the
    forward pass, in training and in evaluation; gradients pass as if there were no rounding, except of inputs outside
    of the grid, which get none. Weights have one grid per output channel, symmetric around 0. Inputs have one grid per
    layer: it covers the moving average of the least and the largest input of each training batch.

    When to use it: if `forge export --quantize int8-static` alone loses too much. Validation metrics are those of the
    quantised model. `forge export RUN --quantize int8-static` then uses the learnt ranges instead of calibrating on
    data, and quantises the same layers.

    The task keeps its layers and the names of its weights, which stay in float32; checkpoints and exported weights load
    with and without the plugin. The ranges are saved as the plugin's state. A network that trains from scratch may be
    better for some time without rounding: train it so, and begin here from its weights. Inputs that are NaN or infinite
    do not move a range. On several ranks the ranges are averaged after each update, over the ranks on which a batch has
    reached the layer.

    What you see: the log lists the layers, and those that no batch has reached at the end of a run, which an export
    leaves in float.

    Together with: averages (`ema`, `swa`) are rounded when they are evaluated. Under `amp` the grid is computed in
    float32, and its values are rounded to the short type. `cuda_graph` captures updates.
    `tensor_parallel`, which splits layers, is refused.

    ::

        forge fit quickstart -p qat
        forge fit quickstart -p qat qat.keep=net.7 trainer.max_epochs=2
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        keep: str | list[str] = field(default_factory=list)
        "Patterns of layers to leave in float, such as head or 'encoder.*'."

    config: Config
    provides = ("fake_quantization",)
    conflicts = {"split_layers": "Train without splitting layers, or quantise at export: int8-static calibrates."}
    capturable = True

    def __init__(self, *first: str | list[str], **values: Any):
        super().__init__(*first, **values)
        self._layers: dict[str, nn.Module] = {}

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, phase: str) -> None:
        if phase != "surgery" or trainer.verb != "fit":
            return
        self._layers = self._choose(trainer.task)
        for layer in self._layers.values():
            install(layer)
        logger.info("qat rounds inputs and weights of %d layers: %s.", len(self._layers), listed(self._layers))

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        if step.trainer.env.world > 1:
            self._average_over_ranks(step.trainer)

    @forge.hookimpl
    def forge_end(self) -> None:
        unseen = [name for name, layer in self._layers.items() if not vars(layer)[SEEN]]
        if unseen and len(unseen) < len(self._layers):
            text = "qat: no training batch has reached %s: without a range an export leaves such layers in float."
            logger.warning(text, listed(unseen))
        for layer in self._layers.values():
            remove(layer)
        self._layers = {}

    def _choose(self, task: nn.Module) -> dict[str, nn.Module]:
        every = {name: module for name, module in task.named_modules() if type(module) in FORWARDS}
        for pattern in as_list(self.config.keep):
            if not covers([pattern], every):
                raise RecipeError(
                    f"qat.keep: {pattern!r} matches no layer of {type(task).__name__} that can be quantised. They are "
                    f"{listed(every, most=12) or 'none'}."
                )
        chosen = {n: m for n, m in every.items() if not covers(as_list(self.config.keep), [n])}
        if not chosen:
            kinds = ", ".join(f"nn.{kind.__name__}" for kind in FORWARDS)
            raise TaskError(
                f"qat: {type(task).__name__} has nothing to quantise: no layer {'but qat.keep ' if every else ''}is "
                f"one of {kinds}. Remove qat."
            )
        return chosen

    @torch.no_grad()
    def _average_over_ranks(self, trainer: forge.Run) -> None:
        """Give each layer the mean range of the ranks on which a batch has reached it."""
        ranges = [layer.get_buffer(RANGE) for layer in self._layers.values()]
        own = torch.stack(ranges)
        reached = (own[:, 2:] > 0).float()
        total = trainer.env.sum(torch.cat((own, reached), 1))  # where nothing was seen, a range is zeros
        mean = total[:, :3] / total[:, 3:].clamp(min=1)
        foreach_copy_(ranges, list(mean.unbind()))
        layers = [vars(layer) for layer in self._layers.values()]
        if not all(layer[SEEN] for layer in layers):  # rare; it reads from the device
            for layer, count in zip(layers, mean[:, 2].tolist(), strict=True):
                layer[SEEN] = count > 0

    # -- state --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        """Return least input, largest input and number of batches by layer, for a resume and for `forge export`."""
        return {"ranges": {name: layer.get_buffer(RANGE) for name, layer in self._layers.items()}}

    @forge.hookimpl
    def forge_load_state_dict(self, trainer: forge.Run, state: dict[str, Any]) -> None:
        then, now = state["ranges"].keys(), self._layers.keys()
        if then != now and not trainer.allow_inexact:
            raise CheckpointError(
                f"qat: the run to be resumed rounded other layers; they differ in {listed(sorted(then ^ now))}. Use "
                "the same qat.keep, or set allow_inexact=True (trainer.allow_inexact=true on the command line)."
            )
        for name in then & now:
            layer, saved = self._layers[name], state["ranges"][name]
            layer.get_buffer(RANGE).copy_(saved)
            vars(layer)[SEEN] = bool(saved[2] > 0)


# ---------------------------------------------------------------------------------------------------------------------
# One layer


def install(layer: nn.Module) -> None:
    """Make a layer round its input and its weight; `remove` undoes it."""
    layer.register_buffer(RANGE, torch.zeros(3, device=next(layer.parameters()).device), persistent=False)
    vars(layer)[SEEN] = False
    # a bound method: a copy of the layer gets one bound to the copy
    vars(layer)["forward"] = MethodType(FORWARDS[type(layer)], layer)


def remove(layer: nn.Module) -> None:
    """Restore a layer's own forward."""
    for name in ("forward", SEEN):
        vars(layer).pop(name, None)
    delattr(layer, RANGE)


def rounded(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return input and weight as the layer shall see them; observe the input in a training step."""
    seen: Tensor = getattr(layer, RANGE)
    if layer.training and torch.is_grad_enabled() and x.numel():
        observe(seen, x.detach())
        vars(layer)[SEEN] = True
    if not vars(layer)[SEEN]:
        return x, layer.weight
    return round_input(x, seen), round_weight(layer.weight)


@torch.no_grad()
def observe(seen: Tensor, x: Tensor) -> None:
    """Move a range towards the range of this input: the mean of the first ones, later a moving average."""
    found = torch.stack(torch.aminmax(x)).float()
    count = seen[2:] + 1
    moved = torch.cat((torch.lerp(seen[:2], found, (1 / count).clamp(min=MOMENTUM)), count))
    seen.copy_(torch.where(found.isfinite().all(), moved, seen))


def round_input(x: Tensor, seen: Tensor) -> Tensor:
    """Round an input to its layer's grid, straight through for gradients."""
    low, high, _ = seen.unbind()
    return torch.fake_quantize_per_tensor_affine(x.float(), *activation_grid(low, high), 0, STEPS).to(x.dtype)


def round_weight(weight: Tensor) -> Tensor:
    """Round a weight to the grid of each output channel, straight through for gradients."""
    scale = weight_scale(weight)
    zero = torch.zeros_like(scale)  # of integers torch would read least and largest from the device
    rounded = torch.fake_quantize_per_channel_affine(weight.float(), scale, zero, 0, -LARGEST, LARGEST)
    return rounded.to(weight.dtype)


def linear(self: Any, x: Tensor) -> Tensor:
    """The forward of an nn.Linear, rounded."""
    x, weight = rounded(self, x)
    return F.linear(x, weight, self.bias)


def convolution(self: Any, x: Tensor) -> Tensor:
    """The forward of a convolution, rounded."""
    x, weight = rounded(self, x)
    return self._conv_forward(x, weight, self.bias)


FORWARDS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
}
"""The layers that can be rounded, by their exact class: a subclass may compute something else."""
