"""What an update does to parameters: norms of gradients and weights, and how far the weights move.

Everything is computed on the device, in one kernel for all parameters where torch has one; nothing is read here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import forge
from forge.snapshot.non_finite import values_of
from forge_plugins.monitor.modules import layer_of
from forge_plugins.monitor.packing import Contents, histogram, stacked
from forge_plugins.torch_internals import foreach_norm, foreach_sub_

Numbers = dict[str, float]
"""By the name of a parameter or of a layer; "" is all of them together."""

WIDE = (torch.float32, torch.float64)


class Parameters:
    """Records the parameters of the current optimizer, before and after its step."""

    def __init__(self, step: forge.Step, weights: bool, draw: bool):
        own = {id(parameter) for parameter in step.parameters()}
        self._task, self._device = step.trainer.task, step.trainer.env.device
        self._has_all = step.trainer.env.parts is None
        named = [(n, p) for n, p in self._task.named_parameters() if id(p) in own and p.requires_grad]
        self._named = [(n, p) for n, p in named if not p.is_meta]  # another rank holds the values of others
        self._weights, self._draw = weights, draw
        self._with_gradient: list[str] = []
        self._missing: list[str] = []
        self._before: list[Tensor] = []
        self.pack: dict[str, Tensor] = {}
        "The tensors to read."

    @torch.no_grad()
    def before_step(self) -> None:
        """Record final gradients and unmoved weights."""
        weights = [values_of(p.detach()) for _, p in self._named]
        if weights:
            self.pack["norm_before"] = self._norms(weights)
        if self._weights:
            self._before = [weight.clone() for weight in weights]
        gradients = {name: values_of(p.grad.detach()) for name, p in self._named if p.grad is not None}
        if self._has_all:  # else another rank may have it
            self._missing = [name for name, p in self._named if p.grad is None]
        if gradients:
            self._with_gradient = list(gradients)
            self.pack["grad_norm"] = self._norms(gradients.values())
            self.pack["grad_spread"] = stacked((x for g in gradients.values() for x in spread(g)), self._device)
        if self._draw:
            self.pack |= {f"histogram/gradient/{name}": histogram(gradient) for name, gradient in gradients.items()}

    @torch.no_grad()
    def after_step(self, updated: bool) -> None:
        """Record how far the weights have moved."""
        if not self._weights:
            return
        now = [values_of(p.detach()) for _, p in self._named]
        if self._before:
            self.pack["weight_norm"] = self._norms(now)
        if self._before and updated:
            foreach_sub_(self._before, now)
            self.pack["change"] = self._norms(self._before)
        self._before = []
        if self._draw:
            self.pack |= {f"histogram/weight/{n}": histogram(w) for (n, _), w in zip(self._named, now, strict=True)}

    def _norms(self, tensors: Iterable[Tensor]) -> Tensor:
        return stacked(norms(list(tensors)), self._device)

    def read(self, contents: Contents) -> Readings:
        """Return the readings from the contents of `pack`."""
        everything = [name for name, _ in self._named]

        def by_name(names: list[str], what: str) -> Numbers:
            return dict(zip(names, contents.get(what, ()), strict=False))

        spreads = contents.get("grad_spread", [])
        return Readings(
            missing=self._missing,
            grad_norm=by_name(self._with_gradient, "grad_norm"),
            grad_std=dict(zip(self._with_gradient, spreads[::2], strict=False)),
            grad_mean=dict(zip(self._with_gradient, spreads[1::2], strict=False)),
            weight_norm=by_name(everything, "weight_norm"),
            norm_before=by_name(everything, "norm_before"),
            change=by_name(everything, "change"),
        )


@dataclass(slots=True)
class Readings:
    """Numbers by parameter; layers and totals follow from them."""

    missing: list[str] = field(default_factory=list)
    "Trained parameters without a gradient."
    grad_norm: Numbers = field(default_factory=dict)
    grad_std: Numbers = field(default_factory=dict)
    grad_mean: Numbers = field(default_factory=dict)
    weight_norm: Numbers = field(default_factory=dict)
    "After the update."
    norm_before: Numbers = field(default_factory=dict)
    change: Numbers = field(default_factory=dict)
    "The norm of the change by the update; empty if it was skipped."

    def metrics(self) -> Numbers:
        """Return the logged metrics: total, by layer if it has several parameters, and by parameter."""
        norms = {"grad_norm": self.grad_norm, "weight_norm": self.weight_norm}
        found = {_path(what, name): value for what, of in norms.items() for name, value in _with_sums(of).items()}
        ratios = _ratios(_with_sums(self.change), _with_sums(self.norm_before))
        found |= {_path("update_ratio", name): value for name, value in ratios.items()}
        for what in ("grad_mean", "grad_std"):
            found |= {f"{what}/{name}": value for name, value in getattr(self, what).items()}
        return found

    def layers(self, what: str) -> Numbers:
        """Return a norm by layer."""
        return by_layer(getattr(self, what))

    def layer_ratios(self) -> Numbers:
        """Return how far each layer moved, as a share of its size."""
        return _ratios(self.layers("change"), self.layers("norm_before"))


def by_layer(norms: Numbers) -> Numbers:
    """Return the joint norm of each layer's parameters."""
    squares: Numbers = {}
    for name, norm in norms.items():
        squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + norm * norm
    return {layer: math.sqrt(square) for layer, square in squares.items()}


def _with_sums(norms: Numbers) -> Numbers:
    if not norms:
        return {}
    counts: dict[str, int] = {}
    for name in norms:
        counts[layer_of(name)] = counts.get(layer_of(name), 0) + 1
    several = {layer: norm for layer, norm in by_layer(norms).items() if counts[layer] > 1}
    return {"": math.sqrt(sum(norm * norm for norm in norms.values())), **several, **norms}


def _ratios(changes: Numbers, sizes: Numbers) -> Numbers:
    """Return how far weights moved, as a share of their size; weights that were 0 are left out."""
    return {name: change / sizes[name] for name, change in changes.items() if sizes[name] > 0}


def _path(what: str, name: str) -> str:
    return f"{what}/{name}" if name else what


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the norm of each tensor, at least in float32."""
    found: dict[int, Tensor] = {}
    for dtype in (torch.float32, None):
        places = [i for i, tensor in enumerate(tensors) if (tensor.dtype in WIDE) == (dtype is None)]
        if places:
            found |= zip(places, foreach_norm([tensors[i] for i in places], 2, dtype=dtype), strict=True)
    return [found[i] for i in range(len(tensors))]


def widened(values: Tensor) -> Tensor:
    """Return the values at least in float32."""
    return values if values.dtype in WIDE else values.float()


def spread(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return standard deviation and mean, at least in float32; 0 for a single value."""
    if values.numel() == 0:
        nothing = values.new_zeros((), dtype=torch.float32)
        return nothing, nothing
    return torch.std_mean(widened(values), correction=min(1, values.numel() - 1))
