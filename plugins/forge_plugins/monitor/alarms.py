"""Alarms about layers: gradients that vanish, explode or are missing, dead and saturated units.

Layers are judged, not single parameters: the bias before a batch normalisation, or that of attention's keys, has a
gradient of 0 up to rounding in the healthiest network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Protocol

from torch import nn

from forge_plugins._patterns import listed
from forge_plugins.monitor.activations import RECTIFIERS, Activation
from forge_plugins.monitor.gradients import Readings

SETTLED = 10
"""Updates before the first judgement: layers initialised at 0 pass nothing on at first."""
EVIDENCE = 32
"""A unit that was 0 fewer times than this may be so by chance."""
ABSURD = 1e6
"""A gradient this many times larger than the layer's weights explodes, whatever the other layers."""
WORST = 30.0
"""Upper bound of an alarm's severity, in powers of ten."""


class Limits(Protocol):
    """The limits among monitor's options."""

    vanishing: float | None
    exploding: float | None
    dead: float | None
    saturated: float | None


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is wrong with a layer, and by how many powers of ten more than its limit allows."""

    kind: str
    layer: str
    detail: str = ""
    worse_by: float = 0.0
    beside: str = ""
    "The reference value, if it is the same for all layers."


TEXTS = {
    "nothing": (
        "every gradient is exactly 0, so nothing is learned. That is right only where the loss cannot get any "
        "smaller; otherwise the last activation is dead or saturated, or the loss is clipped."
    ),
    "missing": (
        "no gradient reached {layers}. The optimizer has them, but the loss did not depend on them in this window. Use "
        "them in training_step, or freeze them with requires_grad_(False)."
    ),
    "vanishing": (
        "the gradient vanishes in {layers}; {beside}. Next to nothing is learned there. Try ReLU or GELU in place of "
        "sigmoid and tanh, residual connections, normalisation, or a larger initialisation. "
        "(monitor.vanishing={vanishing:g})"
    ),
    "exploding": (
        "the gradient explodes in {layers}; {beside}. Try -p clip, a smaller learning rate or warm-up, normalisation, "
        "or a smaller initialisation. (monitor.exploding={exploding:g})"
    ),
    "leaping": (
        "one update moved {layers} by more than the layer's own size. Try a smaller learning rate or warm-up, or "
        "-p clip."
    ),
    "dead": (
        "dead units in {layers}: they put out 0 for every sample, so nothing before them learns. Try a smaller "
        "learning rate, LeakyReLU or GELU, normalisation, or another initialisation. (monitor.dead={dead:g})"
    ),
    "unreached": (
        "dead units in {layers}: no sample has a gradient for them, because the activation behind them is 0 or "
        "saturated. Try a smaller learning rate, LeakyReLU or GELU, or normalisation. (monitor.dead={dead:g})"
    ),
    "saturated": (
        "saturated units in {layers}: their outputs are near the ends of their range, where no gradient passes. Try "
        "normalisation before them, a smaller initialisation, or ReLU or GELU. (monitor.saturated={saturated:g})"
    ),
}
"""The text of each alarm, with remedies."""


class Judge:
    """Finds alarms, and reports each once; again only when it has become ten times worse."""

    def __init__(self, limits: Limits, task: nn.Module, reported: Mapping[str, float] | None = None):
        self._limits, self._task = limits, task
        self.reported: dict[str, float] = dict(reported or {})
        "Reported alarms, with their severity."

    def say(self, readings: Readings, activations: Mapping[str, Activation], samples: int) -> list[str]:
        """Return new alarms, one message for each kind."""
        fresh = [alarm for alarm in self._find(readings, activations, samples) if self._is_news(alarm)]
        said: list[str] = []
        for kind, group in groupby(fresh, key=lambda alarm: alarm.kind):
            alarms = list(group)
            layers = listed([self._named(alarm) for alarm in alarms])
            said.append(TEXTS[kind].format(layers=layers, beside=alarms[0].beside, **self._numbers()))
        return said

    def _is_news(self, alarm: Alarm) -> bool:
        key = f"{alarm.kind} {alarm.layer}"
        if key in self.reported and alarm.worse_by < self.reported[key] + 1:
            return False
        self.reported[key] = alarm.worse_by
        return True

    def _named(self, alarm: Alarm) -> str:
        """ "net.0 (Linear, norm 3e-09)"."""
        try:
            kind = type(self._task.get_submodule(alarm.layer)).__name__
        except AttributeError:  # a parameter
            kind = ""
        said = ", ".join(filter(None, [kind, alarm.detail]))
        return f"{alarm.layer} ({said})" if said else alarm.layer

    def _numbers(self) -> dict[str, float]:
        limits = self._limits
        found = {name: getattr(limits, name) for name in ("vanishing", "exploding", "dead", "saturated")}
        return {name: math.nan if value is None else value for name, value in found.items()}

    # -- finding ------------------------------------------------------------------------------------------------------

    def _find(self, readings: Readings, activations: Mapping[str, Activation], samples: int) -> Iterator[Alarm]:
        norms = readings.layers("grad_norm")
        if not all(math.isfinite(norm) for norm in norms.values()):
            return  # not about single layers; guard reports it
        yield from (Alarm("missing", name) for name in readings.missing)
        if norms and not any(norms.values()):
            yield Alarm("nothing", "")
            return
        yield from self._vanishing(norms)
        yield from self._exploding(norms, readings.layers("norm_before"))
        yield from self._leaping(readings.layer_ratios())
        dead = list(self._dead(activations))
        yield from dead or (self._unreached(readings.dead_units) if samples >= EVIDENCE else ())
        yield from self._saturated(activations)

    def _vanishing(self, norms: Mapping[str, float]) -> Iterator[Alarm]:
        limit, largest = self._limits.vanishing, max(norms.values(), default=0.0)
        if limit is None:
            return
        for layer, norm in norms.items():
            if norm < limit * largest:
                worse_by = _decades(limit, norm / largest)
                yield Alarm("vanishing", layer, f"norm {norm:.1e}", worse_by, f"the largest layer has {largest:.1e}")

    def _exploding(self, norms: Mapping[str, float], weights: Mapping[str, float]) -> Iterator[Alarm]:
        limit = self._limits.exploding
        if limit is None:
            return
        usual = median([norm for norm in norms.values() if norm] or [0.0])
        beside = f"the median layer has {usual:.1e}"
        for layer, norm in norms.items():
            size = weights.get(layer, 0.0)
            detail = f"norm {norm:.1e}, weights {size:.1e}"
            # far above the others, but small beside its weights: then the others vanish
            if norm > limit * usual and norm > size:
                yield Alarm("exploding", layer, detail, _decades(norm / usual, limit), beside)
            elif size and norm > ABSURD * size:
                yield Alarm("exploding", layer, detail, _decades(norm / size, ABSURD), beside)

    def _leaping(self, ratios: Mapping[str, float]) -> Iterator[Alarm]:
        for layer, ratio in ratios.items():
            if self._limits.exploding is not None and ratio > 1:
                yield Alarm("leaping", layer, f"by {ratio:.2g} times", math.log10(ratio))

    def _dead(self, activations: Mapping[str, Activation]) -> Iterator[Alarm]:
        for name, seen in activations.items():
            enough = seen.evidence >= EVIDENCE and isinstance(self._task.get_submodule(name), RECTIFIERS)
            if enough:
                yield from self._share("dead", name, seen.dead, self._limits.dead)

    def _unreached(self, shares: Mapping[str, float]) -> Iterator[Alarm]:
        for layer, share in shares.items():
            yield from self._share("unreached", layer, share, self._limits.dead)

    def _saturated(self, activations: Mapping[str, Activation]) -> Iterator[Alarm]:
        names = list(activations)
        for place, name in enumerate(names):
            share = activations[name].saturated
            behind = (self._task.get_submodule(other) for other in names[place + 1 :])
            # the model's output may be saturated
            if share is not None and any(module._parameters for module in behind):
                yield from self._share("saturated", name, share, self._limits.saturated)

    def _share(self, kind: str, layer: str, share: float, limit: float | None) -> Iterator[Alarm]:
        if limit is not None and share > limit:
            yield Alarm(kind, layer, f"{100 * share:.3g} %", _decades(1 - limit, 1 - share))


def _decades(more: float, less: float) -> float:
    """Return log10(more / less), at most WORST."""
    return min(math.log10(more / less), WORST) if less > 0 else WORST
