"""Alarms about layers: gradients that vanish, explode or are missing, dead and saturated units, updates too small.

Layers are judged, not single parameters: the bias before a batch normalisation, or that of attention's keys, has a
gradient of 0 up to rounding in the healthiest network. One look proves little: a layer may be left out of one window
(mixture of experts, layer drop), and Adam moves a layer however small its gradient is. So an alarm needs several looks
in a row, and one about the size of gradients a layer that hardly moves, or a loss that does not fall.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean, median, variance
from typing import Any

from torch import nn

from forge.util.patterns import listed
from forge_plugins.monitor.activations import RECTIFIERS, Activation
from forge_plugins.monitor.gradients import Readings

SETTLED = 10
"""Updates before the first judgement: layers initialised at 0 pass nothing on at first."""
EVIDENCE = 32
"""A unit that was 0 fewer times than this may be so by chance."""
ABSURD = 1e6
"""A gradient this many times larger than the layer's weights explodes, whatever the other layers."""
HUGE = 1e3
"""If the median layer's gradient is this many times larger than its weights, all explode, whatever the loss does."""
STILL = 1e-5
"""A layer hardly moves if an update changes it by a smaller share of its size; around 1e-3 is usual."""
IN_A_ROW = 3
"""Looks in a row at which something must be so before it is said."""
NEEDED = {"leaping": 1, "missing": 5}
"""Alarms that need another number of looks."""
GROWS = 1.5
"""A size grows whose second half is larger than its first by more than this factor."""
FALLS = 0.03
"""A loss falls whose second half is lower than its first by this share."""
FEWEST = 6
"""Looks that a trend needs."""
SURE = 2.0
"""Standard errors by which the noise of single windows is ruled out."""
WORST = 30.0
"""Upper bound of an alarm's severity, in powers of ten."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is wrong with a layer, and by how many powers of ten more than its limit allows."""

    kind: str
    layer: str
    detail: str = ""
    worse_by: float = 0.0
    beside: str = ""
    "The reference value, if it is the same for all layers."


LIMITS = ("vanishing", "exploding", "small", "dead", "saturated")
"""Options of monitor that limit something."""
TEXTS = {
    "nothing": (
        "every gradient is exactly 0, so nothing is learned. That is right only where the loss cannot get any "
        "smaller; otherwise the last activation is dead or saturated, or the loss is clipped."
    ),
    "missing": (
        "no gradient reached {layers}. The optimizer has them, but the loss did not depend on them at any look so far. "
        "Use them in training_step, or freeze them with requires_grad_(False)."
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
    "small": (
        "updates are far too small: they move {layers}, where around 1e-3 is usual, and the loss does not fall. Try a "
        "larger learning rate (`forge tune lr` measures one), or a schedule whose warm-up ends earlier. "
        "(monitor.small={small:g})"
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


@dataclass(slots=True)
class Trend:
    """What one optimizer's looks have shown so far."""

    losses: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    "How far each update moved the median layer, as a share of its size."
    reached: set[str] = field(default_factory=set)
    "Parameters that had a gradient at some look."
    absent: set[str] = field(default_factory=set)
    "Parameters that had none at some look."
    rows: dict[tuple[str, str], int] = field(default_factory=dict)
    "By alarm: looks in a row at which it was so."

    def add(self, readings: Readings, loss: float | None) -> None:
        if loss is not None and math.isfinite(loss):
            self.losses.append(loss)
        if ratios := readings.layer_ratios():
            self.ratios.append(median(ratios.values()))

    def never_reached(self, missing: list[str]) -> list[str]:
        """Return those without a gradient at any look, but not an expert: one of several that are left out by turns."""
        by_turns = self.reached & self.absent
        return [
            name
            for name in missing
            if name not in self.reached and not any(_are_siblings(name, other) for other in by_turns)
        ]

    def lasting(self, alarms: list[Alarm]) -> list[Alarm]:
        """Return the alarms that enough looks in a row have shown."""
        self.rows = {(alarm.kind, alarm.layer): self.rows.get((alarm.kind, alarm.layer), 0) + 1 for alarm in alarms}
        needed = {alarm: NEEDED.get(alarm.kind, IN_A_ROW) for alarm in alarms}
        return [alarm for alarm in alarms if self.rows[alarm.kind, alarm.layer] >= needed[alarm]]


class Judge:
    """Finds alarms, and reports each once; again only when it has become ten times worse."""

    def __init__(self, limits: Any, task: nn.Module, reported: Mapping[str, float] | None = None):
        self._limits, self._task = limits, task
        self.reported: dict[str, float] = dict(reported or {})
        "Reported alarms, with their severity."
        self._trends: dict[str, Trend] = {}

    def say(
        self,
        readings: Readings,
        activations: Mapping[str, Activation],
        samples: int,
        loss: float | None = None,
        turn: str = "",
    ) -> list[str]:
        """Return new alarms of one optimizer's turn, one message for each kind."""
        trend = self.meet(readings, turn)
        trend.add(readings, loss)
        lasting = trend.lasting(list(self._find(readings, activations, samples, trend)))
        fresh = [alarm for alarm in lasting if self._is_news(alarm)]
        numbers = {name: getattr(self._limits, name) or math.nan for name in LIMITS}
        said: list[str] = []
        for kind, group in groupby(fresh, key=lambda alarm: alarm.kind):
            alarms = list(group)
            layers = listed([self._named(alarm) for alarm in alarms])
            said.append(TEXTS[kind].format(layers=layers, beside=alarms[0].beside, **numbers))
        return said

    def meet(self, readings: Readings, turn: str = "") -> Trend:
        """Note which parameters have a gradient, also where nothing is judged yet."""
        trend = self._trends.setdefault(turn, Trend())
        trend.reached |= readings.grad_norm.keys()
        trend.absent |= set(readings.missing)
        return trend

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

    # -- finding ------------------------------------------------------------------------------------------------------

    def _find(
        self, readings: Readings, activations: Mapping[str, Activation], samples: int, trend: Trend
    ) -> Iterator[Alarm]:
        norms = readings.layers("grad_norm")
        if not all(math.isfinite(norm) for norm in norms.values()):
            return  # not about single layers; guard reports it
        yield from (Alarm("missing", name) for name in trend.never_reached(readings.missing))
        if norms and not any(norms.values()):
            if not falls(trend.losses):
                yield Alarm("nothing", "")
            return
        ratios = readings.layer_ratios()
        vanishing = list(self._vanishing(norms, ratios, trend))
        yield from vanishing
        yield from self._exploding(norms, readings.layers("norm_before"), ratios, trend)
        yield from () if vanishing else self._small(trend)
        for layer, ratio in ratios.items() if self._limits.exploding is not None else ():
            if ratio > 1:
                yield Alarm("leaping", layer, f"by {ratio:.2g} times", math.log10(ratio))
        dead = list(self._dead(activations))
        yield from dead
        for layer, share in readings.dead_units.items() if not dead and samples >= EVIDENCE else ():
            yield from self._share("unreached", layer, share, self._limits.dead)
        yield from self._saturated(activations)

    def _vanishing(self, norms: Mapping[str, float], ratios: Mapping[str, float], trend: Trend) -> Iterator[Alarm]:
        limit, largest = self._limits.vanishing, max(norms.values(), default=0.0)
        if limit is None:
            return
        for layer, norm in norms.items():
            if norm < limit * largest and (falls(trend.losses) is False or ratios.get(layer, math.inf) < STILL):
                worse_by = _decades(limit, norm / largest)
                yield Alarm("vanishing", layer, f"norm {norm:.1e}", worse_by, f"the largest layer has {largest:.1e}")

    def _exploding(
        self, norms: Mapping[str, float], weights: Mapping[str, float], ratios: Mapping[str, float], trend: Trend
    ) -> Iterator[Alarm]:
        limit = self._limits.exploding
        if limit is None:
            return
        usual = median([norm for norm in norms.values() if norm] or [0.0])
        beside = f"the median layer has {usual:.1e}"
        shares = [norm / weights[layer] for layer, norm in norms.items() if norm and weights.get(layer)]
        largest = ABSURD if not shares or median(shares) < HUGE else HUGE
        harmful = falls(trend.losses) is False or any(ratio < STILL for ratio in ratios.values())
        for layer, norm in norms.items():
            size = weights.get(layer, 0.0)
            detail = f"norm {norm:.1e}, weights {size:.1e}"
            # far above the others, but small beside its weights: then the others vanish
            if harmful and norm > limit * usual and norm > size:
                yield Alarm("exploding", layer, detail, _decades(norm / usual, limit), beside)
            elif size and norm > largest * size:
                yield Alarm("exploding", layer, detail, _decades(norm / size, largest), beside)

    def _small(self, trend: Trend) -> Iterator[Alarm]:
        """Updates that were too small at every look, do not grow (a warm-up does), and lower no loss."""
        limit, ratios = self._limits.small, trend.ratios
        half = len(ratios) // 2
        if limit is None or falls(trend.losses) or len(trend.losses) < FEWEST or max(ratios, default=limit) >= limit:
            return
        if sum(ratios[-half:]) <= GROWS * sum(ratios[:half]):
            detail = f"{max(ratios):.1e} of its weights at most"
            yield Alarm("small", "the median layer", detail, _decades(limit, max(ratios)))

    def _dead(self, activations: Mapping[str, Activation]) -> Iterator[Alarm]:
        for name, seen in activations.items():
            if seen.evidence >= EVIDENCE and isinstance(self._task.get_submodule(name), RECTIFIERS):
                yield from self._share("dead", name, seen.dead, self._limits.dead)

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


def _are_siblings(name: str, other: str) -> bool:
    """Whether two parameters are the same of two entries of one list: "experts.0.weight" and "experts.5.weight"."""
    parts = list(zip(name.split("."), other.split("."), strict=False))
    differing = [pair for pair in parts if pair[0] != pair[1]]
    return name.count(".") == other.count(".") and len(differing) == 1 and all(map(str.isdigit, differing[0]))


def _decades(more: float, less: float) -> float:
    """Return log10(more / less), at most WORST."""
    return min(math.log10(more / less), WORST) if less > 0 else WORST


def falls(losses: Sequence[float]) -> bool | None:
    """Return whether a loss falls over its looks; None if they are too few, or too noisy, to say."""
    first, second = losses[: len(losses) // 2], losses[len(losses) // 2 :]
    if len(losses) < FEWEST:
        return None
    fall = fmean(first) - fmean(second) - FALLS * abs(fmean(first))
    noise = SURE * math.sqrt(variance(first) / len(first) + variance(second) / len(second))
    return fall > 0 if abs(fall) >= noise else None
