"""Values: what each split holds: NaN, infinities, columns that never change, labels that train never saw."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from forge.data.tensor import TensorLoader
from forge_doctor.deadline import Deadline
from forge_doctor.experiments.intervene import exchanged, says
from forge_doctor.experiments.reading import places
from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient, tensors
from forge_doctor.probes.data import is_target, stacked
from forge_doctor.stored import indexed, read

FEWEST = 30
MOST_KINDS = 200


def finite(patient: Patient) -> Iterator[Finding]:
    """NaN and infinities in the samples of each split, and whether they reach what the step returns."""
    for split, samples in (("train", patient.samples), ("val", patient.val_samples)):
        for place in range(len(samples[0]) if samples else 0):
            held = [(i, s[place]) for i, s in enumerate(samples) if len(s) > place and s[place].is_floating_point()]
            bad = [(i, x) for i, x in held if not bool(x.isfinite().all())]
            if not bad:
                continue
            first, x = bad[0]
            spoils = _spoils(patient, split, place, x)
            yield Finding(
                "bad_values",
                f"{len(bad)} of {len(samples)} samples of {split} hold NaN or an infinity in tensor {place}; the first "
                f"is sample {first}, with {int((~x.isfinite()).sum())} of {x.numel()} numbers. "
                + ("The loss is not a number then." if spoils else "The step's numbers are finite all the same."),
                split,
                {"samples": len(bad), "first": first, "tensor": place},
                level="warning" if spoils else "note",
            )


def _spoils(patient: Patient, split: str, place: int, bad: Tensor) -> bool:
    """Whether a step that gets such a sample returns a number that is none."""
    batches = patient.val_batches if split == "val" else patient.batches
    if not batches or (split == "val" and not patient.can_validate):
        return True
    x = tensors(batches[0])[place]

    def change(x: Tensor) -> Tensor:
        x[0] = bad.to(x)
        return x

    said = says(patient, exchanged(batches[0], x, change), split)
    return any(value != value or value in (float("inf"), float("-inf")) for value in said.values())


def unseen(patient: Patient) -> Iterator[Finding]:
    """Whole numbers of val, labels or ids, that train never has."""
    train, val = stacked(patient, patient.samples), stacked(patient, patient.val_samples)
    for place, y in val.items():
        x = train.get(place)
        if x is None or x.is_floating_point() or x.dtype == torch.bool or len(x) < FEWEST or len(y) < FEWEST:
            continue
        if not is_target(patient, place):
            continue
        known, asked = x.unique(), y.unique()
        new = asked[~torch.isin(asked, known)]
        share = float(torch.isin(y, new).float().mean())
        if len(known) <= MOST_KINDS and len(new) and share > 0.02:
            text = (
                f"{share:.0%} of the labels of val, tensor {place}, never occur in train: {new.tolist()[:6]}; those of "
                f"train run from {int(known.min())} to {int(known.max())}."
            )
            level = "note" if share == 1 else ""  # as of persons or words that are new on purpose
            yield Finding("values_unseen", text, "val", {"share": share, "new": new.tolist()[:20]}, level=level)


def layout(patient: Patient) -> Iterator[Finding]:
    """Pictures whose numbers are laid out as (height, width, channels) and read as (channels, height, width)."""
    path, x = patient.first_input or ("", torch.zeros(0))
    if x.ndim != 4 or x.shape[1] not in (3, 4) or min(x.shape[2:]) < 8 or len(x) < 4:
        return
    n, c, h, w = x.shape
    other = x.contiguous().reshape(n, h, w, c).permute(0, 3, 1, 2)
    mine, theirs = _smoothness(x), _smoothness(other)
    if theirs > 0.5 and mine < 0.4 * theirs:
        text = (
            f"The pictures that reach {path} look scrambled: neighbouring pixels correlate by {mine:.2f}, and by "
            f"{theirs:.2f} if the same numbers are read as (height, width, channels)."
        )
        yield Finding("pixels_scrambled", text, path, {"as given": mine, "as height, width, channels": theirs})


def _smoothness(x: Tensor) -> float:
    """How much neighbouring pixels have in common."""
    x = x.float() - x.float().mean((2, 3), keepdim=True)
    both = torch.stack([x[..., 1:].flatten(), x[..., :-1].flatten()])
    return float(torch.corrcoef(both)[0, 1])


def coverage(patient: Patient) -> Iterator[Finding]:
    """How many of the samples an epoch draws."""
    loader = patient.train
    dataset, sampler = indexed(loader), getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None)
    if dataset is None or sampler is None or len(dataset) < 20:
        return
    drawn: set[int] = set()
    for index in itertools.islice(iter(copy.deepcopy(sampler)), 100_000):
        drawn |= {int(index)} if isinstance(index, (int, Tensor)) else {int(i) for i in index}
    share = len(drawn) / len(dataset)
    if share < 0.1:
        yield Finding(
            "dropped_data",
            f"An epoch draws {len(drawn)} of the {len(dataset)} samples of train: the sampler, "
            f"{type(getattr(loader, 'sampler', sampler)).__name__}, leaves the others out.",
            "train",
            {"drawn": len(drawn), "samples": len(dataset)},
            cure="Give a weighted sampler one weight for each sample, and as many draws as samples.",
        )


ORDERED, FEWEST_BATCHES, SECONDS = 4.0, 8, 1.0
"""How many times as much as by chance the means of batches may vary, the batches to judge by, and the time to read."""

ONE_ORDER = "Every epoch of train has one order: the same samples meet in the same batches."


def order(patient: Patient) -> Iterator[Finding]:
    """Where every epoch has one order, targets, and other single numbers, must vary between its batches by chance."""
    loader = patient.train
    dataset, sampler = indexed(loader), getattr(loader, "batch_sampler", None)
    if isinstance(loader, TensorLoader) and not loader.shuffle and len(loader) > 1:
        yield Finding("not_shuffled", ONE_ORDER, "train", level="note")
    if dataset is None or sampler is None:
        return
    sampler = copy.deepcopy(sampler)
    epochs = [[list(map(int, x)) for x in itertools.islice(sampler, 60)] for _ in range(2)]
    told, within = places(patient)[1], Deadline(SECONDS)
    if epochs[0] != epochs[1] or len(epochs[0]) < 2 or not told:
        return
    served: list[list[tuple[Tensor, ...]]] = []
    for indices in epochs[0]:
        served.append([read(loader, i, SEED + i) for i in indices])
        if within.is_over:
            break
    targets = [tensors(patient.batches[0])[i].flatten().double().cpu() for i in told]
    for place in range(min(map(len, itertools.chain(*served)))):
        means = [torch.stack([sample[place].double().mean() for sample in batch]) for batch in served]
        is_told = any(len(y) <= len(means[0]) and torch.allclose(means[0][: len(y)], y, 1e-4) for y in targets)
        every = torch.cat(means)
        is_one_number = all(sample[place].numel() == 1 for batch in served for sample in batch)
        if not is_told and (not is_one_number or bool((every.diff() >= 0).all())):  # it may count samples, or hours
            continue
        between = sum(len(y) * float((y.mean() - every.mean()) ** 2) for y in means) / max(1, len(means) - 1)
        ratio = between / max(float(every.var()), 1e-20)
        if len(means) >= FEWEST_BATCHES and ratio > ORDERED:
            text = (
                f"Every epoch of train has one order, and in it neighbours are alike: the means of tensor {place} of a "
                f"sample over {len(means)} batches vary {ratio:.3g} times as much as those of samples drawn at random."
            )
            yield Finding("not_shuffled", text, "train", {"ratio": ratio, "batches": len(means)})
            return
    yield Finding("not_shuffled", ONE_ORDER, "train", level="note")
