"""Alarms about layers: gradients that vanish, explode or are missing.

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

from torch import nn

from forge.util.patterns import listed
from forge_plugins.monitor.gradients import Readings

SETTLED = 10
"""Updates before the first judgement: layers initialised at 0 pass nothing on at first."""
VANISHING = 1e-5
"""A gradient vanishes below this share of the largest layer's."""
EXPLODING = 1e3
"""A gradient explodes above this many times the median layer's."""
ABSURD = 1e6
"""A gradient this many times larger than the layer's weights explodes, whatever the other layers."""
HUGE = 1e3
"""If the median layer's gradient is this many times larger than its weights, all explode, whatever the loss does."""
STILL = 1e-5
"""A layer hardly moves if an update changes it by a smaller share of its size; around 1e-3 is usual."""
LOOKS = {"nothing": 3, "missing": 5, "vanishing": 3, "exploding": 3}
"""Looks in a row at which something must be so before it is said."""
FALLS = 0.03
"""A loss falls whose second half is lower than its first by this share."""
FEWEST = 6
"""Looks that a trend needs."""
SURE = 2.0
"""Standard errors by which the noise of single windows is ruled out."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is wrong with a layer."""

    kind: str
    layer: str
    detail: str = ""
    beside: str = ""
    "The reference value, which is the same for all layers."


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
        "sigmoid and tanh, residual connections, normalisation, or a larger initialisation."
    ),
    "exploding": (
        "the gradient explodes in {layers}; {beside}. Try -p clip, a smaller learning rate or warm-up, normalisation, "
        "or a smaller initialisation."
    ),
}
"""The text of each alarm, with remedies."""


@dataclass(slots=True)
class Trend:
    """What one optimizer's looks have shown so far."""

    losses: list[float] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    "Parameters that had a gradient at some look."
    absent: set[str] = field(default_factory=set)
    "Parameters that had none at some look."
    rows: dict[tuple[str, str], int] = field(default_factory=dict)
    "By alarm: looks in a row at which it was so."

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
        return [alarm for alarm in alarms if self.rows[alarm.kind, alarm.layer] >= LOOKS[alarm.kind]]


class Judge:
    """Finds alarms, and tells each once."""

    def __init__(self, task: nn.Module):
        self._task = task
        self._told: set[str] = set()
        self._trends: dict[str, Trend] = {}

    def say(self, readings: Readings, loss: float | None = None, turn: str = "", settled: bool = True) -> list[str]:
        """Return new alarms of one optimizer's turn, one message for each kind; none before the run has settled."""
        trend = self._trends.setdefault(turn, Trend())
        trend.reached |= readings.grad_norm.keys()
        trend.absent |= set(readings.missing)
        if not settled:
            return []
        if loss is not None and math.isfinite(loss):
            trend.losses.append(loss)
        fresh = [alarm for alarm in trend.lasting(list(self._find(readings, trend))) if self._is_news(alarm)]
        said: list[str] = []
        for kind, group in groupby(fresh, key=lambda alarm: alarm.kind):
            alarms = list(group)
            layers = listed([self._named(alarm) for alarm in alarms])
            said.append(TEXTS[kind].format(layers=layers, beside=alarms[0].beside))
        return said

    def _is_news(self, alarm: Alarm) -> bool:
        key = f"{alarm.kind} {alarm.layer}"
        is_news = key not in self._told
        self._told.add(key)
        return is_news

    def _named(self, alarm: Alarm) -> str:
        """ "net.0 (Linear, norm 3e-09)"."""
        try:
            kind = type(self._task.get_submodule(alarm.layer)).__name__
        except AttributeError:  # a parameter
            kind = ""
        said = ", ".join(filter(None, [kind, alarm.detail]))
        return f"{alarm.layer} ({said})" if said else alarm.layer

    # -- finding ------------------------------------------------------------------------------------------------------

    def _find(self, readings: Readings, trend: Trend) -> Iterator[Alarm]:
        norms = readings.layers("grad_norm")
        if not all(math.isfinite(norm) for norm in norms.values()):
            return  # not about single layers; guard reports it
        yield from (Alarm("missing", name) for name in trend.never_reached(readings.missing))
        if norms and not any(norms.values()):
            if not falls(trend.losses):
                yield Alarm("nothing", "")
            return
        ratios = readings.layer_ratios()
        yield from self._vanishing(norms, ratios, trend)
        yield from self._exploding(norms, readings.layers("norm_before"), ratios, trend)

    def _vanishing(self, norms: Mapping[str, float], ratios: Mapping[str, float], trend: Trend) -> Iterator[Alarm]:
        largest = max(norms.values(), default=0.0)
        for layer, norm in norms.items():
            if norm < VANISHING * largest and (falls(trend.losses) is False or ratios.get(layer, math.inf) < STILL):
                yield Alarm("vanishing", layer, f"norm {norm:.1e}", f"the largest layer has {largest:.1e}")

    def _exploding(
        self, norms: Mapping[str, float], weights: Mapping[str, float], ratios: Mapping[str, float], trend: Trend
    ) -> Iterator[Alarm]:
        usual = median([norm for norm in norms.values() if norm] or [0.0])
        shares = [norm / weights[layer] for layer, norm in norms.items() if norm and weights.get(layer)]
        largest = ABSURD if not shares or median(shares) < HUGE else HUGE
        harmful = falls(trend.losses) is False or any(ratio < STILL for ratio in ratios.values())
        for layer, norm in norms.items():
            size = weights.get(layer, 0.0)
            # far above the others, but small beside its weights: then the others vanish
            if (harmful and norm > EXPLODING * usual and norm > size) or (size and norm > largest * size):
                detail = f"norm {norm:.1e}, weights {size:.1e}"
                yield Alarm("exploding", layer, detail, f"the median layer has {usual:.1e}")


def _are_siblings(name: str, other: str) -> bool:
    """Whether two parameters are the same of two entries of one list: "experts.0.weight" and "experts.5.weight"."""
    parts = list(zip(name.split("."), other.split("."), strict=False))
    differing = [pair for pair in parts if pair[0] != pair[1]]
    return name.count(".") == other.count(".") and len(differing) == 1 and all(map(str.isdigit, differing[0]))


def falls(losses: Sequence[float]) -> bool | None:
    """Return whether a loss falls over its looks; None if they are too few, or too noisy, to say."""
    first, second = losses[: len(losses) // 2], losses[len(losses) // 2 :]
    if len(losses) < FEWEST:
        return None
    fall = fmean(first) - fmean(second) - FALLS * abs(fmean(first))
    noise = SURE * math.sqrt(variance(first) / len(first) + variance(second) / len(second))
    return fall > 0 if abs(fall) >= noise else None
