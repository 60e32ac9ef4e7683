"""Motion: what a few updates move, beside what they should: weights, averages, losses, metrics; by which gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from statistics import median

import torch
from torch import Tensor, nn

from forge.data.protocols import is_live
from forge_doctor.findings import Finding
from forge_doctor.patient import NotApplicable, Patient
from forge_doctor.patient import named as listed
from forge_doctor.probes.graph import trained
from forge_doctor.probes.start import lost_eps

CLOSE = 0.5
"""The share of the way to the trained weights, in every update, from which an average is no average."""
NEVER, ALWAYS, HARDLY, FEWEST_NORMS = 1e4, 1e3, 1e-6, 4
"""How far a clip is above each norm that never acts, and below that decides; the norm and the updates to judge by."""


class Track:
    """All weights before and after each update, of which the last few are kept."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.with_gradient: set[str] = set()

    def note(self, task: nn.Module) -> None:
        self.weights = [*self.weights[-3:], {name: p.detach().clone() for name, p in task.named_parameters()}]


def still(patient: Patient) -> Iterator[Finding]:
    """Weights that got a gradient in every update, are in an optimizer, and never moved."""
    track, known = patient.track, trained(patient)
    if track is None or len(track.weights) < 3:
        return
    first, last = track.weights[0], track.weights[-1]
    stuck = [
        name
        for name in track.with_gradient & known & first.keys() & last.keys()
        if torch.equal(first[name], last[name])
    ]
    if stuck and len(stuck) < len(known):
        text = (
            f"{len(stuck)} weights get a gradient and are in an optimizer, and no update moves them: "
            f"{listed(sorted(stuck))}."
        )
        yield Finding("weights_stand_still", text, sorted(stuck)[0], {"weights": sorted(stuck)[:8]})


OUTLASTS = 0.3
"""The share of the way to the trained weights that an average must go within the planned run."""
FASTER = (
    "Keep less of the average, 0.99 instead of 0.9999, or let it begin as a plain mean: min(decay, (1 + n) / (10 + n))."
)


def averages(patient: Patient) -> Iterator[Finding]:
    """Weights outside all optimizers that follow trained ones: how far they go in an update, and whether at all."""
    track, known = patient.track, trained(patient)
    if track is None or len(track.weights) < 3:
        return
    before, after = track.weights[-2], track.weights[-1]
    known = {name for name in known if name in before and not torch.equal(before[name], after[name])}
    others = [name for name in after if name not in known and name in before]
    rates: dict[str, float] = {}
    for name in others:
        own = _twin(name, known, after)
        if own is None or name not in before or own not in after:
            continue
        # an average is taken after an update, or in the step before it
        ways = [float((weights[own] - before[name]).norm()) for weights in (before, after)]
        if max(ways) > 0:
            rates[name] = float((after[name] - before[name]).norm()) / min(way for way in ways if way > 0)
    moving = {name: rate for name, rate in rates.items() if rate > 0}
    if moving and min(moving.values()) > CLOSE and _moved_always(track, list(moving)):
        name, rate = min(moving.items(), key=lambda item: item[1])
        text = (
            f"{name} goes {rate:.0%} of the way to the weights that are trained in every update: it is a copy of them "
            "rather than an average of the past."
        )
        yield Finding("average_too_close", text, name, {"share": rate})
    elif moving and patient.trainer.planned_updates:
        name, rate = max(moving.items(), key=lambda item: item[1])
        planned = patient.trainer.planned_updates
        share = 1 - math.exp(-rate * planned)
        if share < OUTLASTS and _moved_always(track, list(moving)):
            text = (
                f"{name} goes {rate:.2g} of the way to the weights that are trained in every update, and {share:.0%} "
                f"of it in the {planned} updates of this run: it stays near its first value."
            )
            yield Finding("average_stands_still", text, name, {"share": share}, level="warning", cure=FASTER)
    elif _is_whole(rates, others) and not moving and not is_live(patient.train):  # one may collect
        text = (
            f"{len(rates)} weights that are in no optimizer have the names and shapes of trained ones and never move: "
            f"{listed(sorted(rates))}. If they are to follow the trained ones, nothing updates them."
        )
        yield Finding("average_stands_still", text, sorted(rates)[0], {"weights": sorted(rates)[:8]})


def _is_whole(found: Iterable[str], others: list[str]) -> bool:
    """Whether these are all weights of the modules that hold them: a copy of another, and not alike by chance."""
    names = set(found)
    holders = {name.partition(".")[0] for name in names}
    return len(names) >= 2 and all(name in names for name in others if name.partition(".")[0] in holders)


def _twin(name: str, known: set[str], weights: dict[str, Tensor]) -> str | None:
    """The trained weight of which this may be the average: the same name inside another module, and the same shape."""
    ends = [name.split(".", n)[n] for n in range(1, name.count(".") + 1)]
    for end in ends:
        found = [other for other in known if other.endswith("." + end) and weights[other].shape == weights[name].shape]
        if len(found) == 1:
            return found[0]
    return None


def _moved_always(track: Track, names: list[str]) -> bool:
    pairs = zip(track.weights[:-1], track.weights[1:], strict=True)
    return all(not torch.equal(a[names[0]], b[names[0]]) for a, b in pairs)


def rates(patient: Patient) -> Iterator[Finding]:
    """Updates against weights."""
    ratios = [value for values in patient.ratios.values() for value in values[:1]]
    largest = [max(values) for values in patient.ratios.values() if values]
    if not largest:
        return
    typical = median(largest)
    if typical > 0.5 and len(largest) > 1 and not patient.shrinks:  # a linear model may take steps of any size
        text = f"One update changes half of the matrices by {typical:.2g} times their size or more."
        yield Finding("learning_rate_high", text, "configure_optimizers", {"ratio": typical})
    elif max(largest) * patient.headroom < 2e-6 and ratios and (max(largest) > 0 or _are_at_rest(patient)):
        text = f"No update changes a matrix by more than {max(largest):.2g} of its size in {patient.updates} updates."
        yield Finding("learning_rate_low", text, "configure_optimizers", {"ratio": max(largest)})
    for entry in patient.trainer.optimizers.entries.values():
        still = [group for group in entry.optimizer.param_groups if float(group.get("initial_lr", group["lr"])) == 0]
        if still and len(still) < len(entry.optimizer.param_groups):
            text = f"{len(still)} of {len(entry.optimizer.param_groups)} parameter groups have a learning rate of 0."
            yield Finding("learning_rate_low", text, "configure_optimizers")


def _are_at_rest(patient: Patient) -> bool:
    """Whether no optimizer has a rate above 0; otherwise weights without a gradient stand still, which others say."""
    groups = [group for entry in patient.trainer.optimizers.entries.values() for group in entry.optimizer.param_groups]
    return all(float(group["lr"]) == 0 for group in groups)


def gradients(patient: Patient) -> Iterator[Finding]:
    """Gradients of the first layers against those of the last, relative to their weights."""
    found = patient.gradient_sizes
    if len(found) < 5:
        return
    third = max(1, len(found) // 3)
    start, end = [value for _, value in found[:third]], [value for _, value in found[-third:]]
    low, high = median(start), median(end)
    if low < 1e-6 * high and high > 0:  # a layer scale of 1e-5 learns all the same
        text = (
            f"Gradients shrink on their way back: relative to its weights {found[0][0]} gets {low:.2g}, "
            f"{found[-1][0]} {high:.2g}."
        )
        yield Finding("vanishing_gradient", text, found[0][0], {"first": low, "last": high})
    elif low > 1e4 * max(high, 1e-30) or max(value for _, value in found) > 1e4:
        text = (
            f"Gradients grow on their way back: relative to its weights {found[0][0]} gets {low:.2g}, "
            f"{found[-1][0]} {high:.2g}."
        )
        yield Finding("exploding_gradient", text, found[0][0], {"first": low, "last": high})


def clipping(patient: Patient) -> Iterator[Finding]:
    """A clip by norm that decides each update, or one that is far above all gradients of the first updates.

    No entry of a gradient is larger than its norm. A gradient that is hardly there is another matter.
    """
    clip = next((plugin for plugin in patient.trainer.stack if plugin.name == "clip"), None)
    if clip is None:
        raise NotApplicable
    bounds = {name: getattr(getattr(clip, "config", None), name, None) for name in ("max_norm", "max_value")}
    given = {name: float(bound) for name, bound in bounds.items() if bound is not None}
    norms = sorted(patient.norms)
    if len(norms) < FEWEST_NORMS or norms[-1] <= HARDLY or not given:
        return
    name = next(iter(given))
    evidence = {"norm": norms[-1], name: given[name], "updates": len(norms)}
    if norms[0] > ALWAYS * given.get("max_norm", norms[0]):
        text = f"Gradients have norms from {norms[0]:.3g} on, and clip.max_norm is {given['max_norm']:g}."
        yield Finding("clips_always", text, "clip.max_norm", evidence)
    elif min(given.values()) > NEVER * norms[-1]:
        text = f"The largest norm of {len(norms)} gradients is {norms[-1]:.3g}, and clip.{name} is {given[name]:g}."
        yield Finding("clips_never", f"{text} The clip never acts.", f"clip.{name}", evidence)


def losses(patient: Patient) -> Iterator[Finding]:
    """Losses that leave all bounds within a few updates."""
    found = patient.losses
    groups = [group for entry in patient.trainer.optimizers.entries.values() for group in entry.optimizer.param_groups]
    if any(map(lost_eps, groups)):
        return  # which is a finding of its own
    if len(found) > 3 and (any(loss != loss for loss in found) or found[-1] > 10 * abs(found[0]) + 10):
        text = f"The loss goes from {found[0]:.4g} to {found[-1]:.4g} within {len(found)} updates."
        yield Finding("diverges", text, type(patient.task).__name__, {"losses": found[:10]})
