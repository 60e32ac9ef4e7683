"""Loopholes: ways in which a loss falls, or changes, that its gradient by the answers does not explain."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from forge_doctor.experiments.answers import held_of
from forge_doctor.experiments.influence import CutWatch, cuts
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, named, parameters

STEPS, RATE = 150, 0.2
"""Updates of the weights that the loss alone has, and their size."""
OFF = 0.02
"""The share of its slope by the answers that is left of a loss that no longer sees them."""
POINTS = 64
UNEXPLAINED = 0.1
"""The share of a change of the loss that its gradient may leave open."""


def given_up(patient: Patient) -> Iterator[Finding]:
    """Hold wrong answers, and train the weights that the loss itself has: giving up must cost something."""
    held = held_of(patient, patient.batches[0])
    if held is None:
        return
    floor, best = held.best()
    wrong = [x.roll(1, 0) if x.ndim else x for x in best]
    own = {name: p for name, p in parameters(held.task).items() if _reaches(held.loss_at(wrong), p)}
    before = held.value_at(wrong)
    if not own or not before > floor + 0.1 * abs(floor) + 1e-6:
        return
    kept = {name: p.detach().clone() for name, p in own.items()}
    slope = _size(held.slopes(wrong))
    try:
        adam = torch.optim.Adam(own.values(), lr=RATE)
        for _ in range(STEPS):
            adam.zero_grad()
            held.loss_at(wrong).backward()
            adam.step()
        after, left = held.value_at(wrong), _size(held.slopes(wrong))
        moved = [name for name, p in own.items() if float((p.detach() - kept[name]).abs().max()) > RATE]
    finally:
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(kept[name])
                p.grad = None
    if slope > 0 and left < OFF * slope and after < before and after <= floor + 0.05 * (before - floor):
        yield Finding(
            "loss_gives_up",
            f"With wrong answers that never change, {named(moved)} alone take the loss from {before:.4g} to "
            f"{after:.4g}, as low as right answers do ({floor:.4g}), and there it no longer sees the answers: "
            "not to learn costs nothing.",
            patient.place(),
            {"wrong answers": before, "given up": after, "right answers": floor},
        )


def _reaches(loss: torch.Tensor, p: torch.nn.Parameter) -> bool:
    if not loss.requires_grad:
        return False
    (found,) = torch.autograd.grad(loss, [p], allow_unused=True)
    return found is not None and bool(found.any())


def _size(found: list[torch.Tensor]) -> float:
    return sum(float(x.double().pow(2).sum()) for x in found) ** 0.5


def explained(patient: Patient) -> Iterator[Finding]:
    """Walk from the answers to better ones: what the gradient says on the way must add up to what the loss does."""
    held = held_of(patient, patient.batches[0])
    if held is None or sum(x.numel() for x in held.values) > 500_000:
        return
    _, best = held.best()
    ends = [x + (y - x).clamp(-4 * _scale(x), 4 * _scale(x)) for x, y in zip(held.values, best, strict=True)]
    way = [y - x for x, y in zip(held.values, ends, strict=True)]
    said, low, high = 0.0, held.value_at(held.values), held.value_at(ends)
    seen = [low]
    for i in range(POINTS):
        at = [x + (i + 0.5) / POINTS * d for x, d in zip(held.values, way, strict=True)]
        said += sum(float((g.double() * d.double()).sum()) for g, d in zip(held.slopes(at), way, strict=True)) / POINTS
        seen.append(held.value_at(at))
    seen.append(high)
    most = max(seen) - min(seen)
    open_ = high - low - said
    if most > 1e-6 and abs(open_) > UNEXPLAINED * most:
        with CutWatch() as watch:
            held.loss_at([x.clone().requires_grad_() * 1 for x in held.values])
        yield Finding(
            "gradient_is_cut",
            f"From the first answers to the best ones the loss changes by {high - low:.4g}, and its gradient on the "
            f"way adds up to {said:.4g}: a part of the loss has no gradient, or another one{cuts(watch)}.",
            held.paths[-1],
            {"change": high - low, "by the gradient": said},
        )


def _scale(x: torch.Tensor) -> float:
    return max(float(x.float().std()) if x.numel() > 1 else 0.0, 0.3)
