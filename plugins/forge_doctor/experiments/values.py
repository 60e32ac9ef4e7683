"""Values: what each split holds: NaN, infinities, columns that never change, labels that train never saw."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forge.data.tensor import TensorLoader
from forge_doctor.deadline import Deadline
from forge_doctor.experiments.answers import answers, held_of, own_weights
from forge_doctor.experiments.intervene import calls_of, exchanged, named, parts, says
from forge_doctor.experiments.reading import places
from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient, tensors
from forge_doctor.probes.data import inputs_of_layers, is_target, stacked
from forge_doctor.stored import arrays, count_of, indexed, read

FEWEST = 30
MOST_KINDS = 200
TOLD, ALONE = 0.97, 8.0
"""The share of a target that a number of the input says which may be the target, and how much less the next leaves."""
MOST_TARGETS = 256
"""Numbers of a target that are looked for in the input."""


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
    for place, what, missing in _missing(tensors(patient.batches[0])):
        if _learns_from(patient, place, missing):
            text = (
                f"Where tensor {place} of a batch is {what}, the answer compared with it has a gradient all the same: "
                "something is filled in, and learnt."
            )
            yield Finding("targets_filled_in", text, patient.place(), level="warning")
            return


def _missing(batch: list[Tensor]) -> Iterator[tuple[int, str, Tensor]]:
    """Where numbers are missing: they are NaN, or all alike where a mask of their shape is False, or True."""
    masks = [(i, x) for i, x in enumerate(batch) if x.dtype == torch.bool and x.ndim]
    for place, y in enumerate(batch):
        if y.is_floating_point() and y.ndim and _is_bad(y):
            yield place, "NaN or an infinity", ~y.isfinite()
        for i, mask in masks if y.dtype != torch.bool else ():
            for missing, value in ((~mask, False), (mask, True)):
                alike = mask.shape == y.shape and bool(missing.any()) and len(y[missing].unique()) == 1
                if alike and int(missing.sum()) > 3 and len(y[~missing].unique()) > 1 and not _is_input(y, missing):
                    yield place, f"one value, and the mask, tensor {i}, {value}", missing


def _is_input(y: Tensor, missing: Tensor) -> bool:
    return bool((y[~missing] == y[missing][0]).any()) and len(y.unique()) == 2  # a mask of its own


def _learns_from(patient: Patient, place: int, missing: Tensor) -> bool:
    """Whether answers that are compared with a target have a slope where it is missing."""
    batch = patient.batches[0]
    y, held = tensors(batch)[place], held_of(patient, batch)
    if held is None:
        return False
    base, other = held.slopes(), held.slopes(batch=exchanged(batch, y, lambda y: y.roll(1, 0)))
    rows = missing.reshape(len(y), -1).all(1)
    compared = [g for g, h in zip(base, other, strict=True) if g.shape == h.shape and not torch.equal(g, h)]
    read = [g[missing] if g.shape[: y.ndim] == y.shape else g[rows] for g in compared if g.ndim and len(g) == len(y)]
    return any(bool((x.isfinite() & (x != 0)).any()) for x in read)


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


def equal(patient: Patient) -> Iterator[Finding]:
    """Tensors of a batch that are the same in every batch, as two views that are drawn alike."""
    held = [parts(batch) for batch in patient.batches]
    names = [name for name, x in held[0].items() if x.is_floating_point() and x.numel() > 16]
    for one, other in itertools.combinations(names, 2):
        pairs = [(row.get(one), row.get(other)) for row in held]
        if all(x is not None and y is not None and x.shape == y.shape and torch.equal(x, y) for x, y in pairs):
            text = f"{named(one, patient)} and {named(other, patient)} are equal in each of {len(pairs)} batches."
            yield Finding("equal_tensors", text, "train")
            return
    yield from _repeated(patient)


def _repeated(patient: Patient) -> Iterator[Finding]:
    """What a layer is given first holds rows twice that the batch holds once: views that were drawn alike."""
    batch, task, found = patient.batches[0], patient.clone(), list[tuple[str, Tensor]]()

    def note(path: str) -> Any:
        return lambda module, args: found.extend((path, x) for x in tensors(args)[:1])

    for path, module in own_weights(task):
        module.register_forward_pre_hook(note(path))
    patient.run(task, batch)
    path, x = found[0] if found else ("", torch.zeros(0))
    same = [y for y in tensors(batch) if x.ndim > 1 and y.shape[1:] == x.shape[1:] and len(x) >= 2 * len(y) > 4]
    if any(_different(y) == len(y) >= _different(x) for y in same):
        text = (
            f"{path} is given each sample more than once, the same to the last bit: views that are drawn must differ."
        )
        yield Finding("equal_tensors", text, patient.place())


def _different(x: Tensor) -> int:
    return len(x.detach().flatten(1).unique(dim=0))


def in_step(patient: Patient) -> Iterator[Finding]:
    """What the step itself makes: NaN or infinities in what layers give, where the batch has none."""
    for stage, batches in patient.stages:
        for batch in batches:
            if any(x.is_floating_point() and not bool(x.isfinite().all()) for x in tensors(batch)):
                continue
            calls, said = calls_of(patient, batch, stage)
            layer = next((path for (path, _), out in calls.items() if any(_is_bad(x) for x in out)), None)
            lost = [name for name, value in said.items() if value != value]
            if layer or lost:
                text = f"{layer or ', '.join(lost)} gives NaN or an infinity in {stage}, for a batch without any."
                yield Finding("bad_values", text, layer or patient.place(stage), {"stage": stage})
                return


def _is_bad(x: Tensor) -> bool:
    return not bool(x.isfinite().all())


def layout(patient: Patient) -> Iterator[Finding]:
    """Pictures whose numbers are laid out as (height, width, channels) and read as (channels, height, width)."""
    for path, x in inputs_of_layers(patient)[:1]:
        if x.ndim != 4 or x.shape[1] not in (3, 4) or min(x.shape[2:]) < 8 or len(x) < 4:
            continue
        n, c, h, w = x.shape
        other = x.contiguous().reshape(n, h, w, c).permute(0, 3, 1, 2)
        mine, theirs = _smoothness(x), _smoothness(other)
        if theirs > 0.5 and mine < 0.4 * theirs:
            text = (
                f"The pictures that reach {path} look scrambled: neighbouring pixels correlate by {mine:.2f}, and by "
                f"{theirs:.2f} if the same numbers are read as (height, width, channels)."
            )
            yield Finding("pixels_scrambled", text, path, {"as given": mine, "as height, width, channels": theirs})


def stored_layout(patient: Patient) -> Iterator[Finding]:
    """Samples whose numbers stand in the order of stored (height, width, channels), as (channels, height, width)."""
    for split, loader in patient.loaders.items():
        stored = arrays(loader) if patient.reads and loader is not None else {}
        for path, held in stored.items():
            count = count_of(loader)
            if held.ndim != 4 or held.shape[-1] not in (2, 3, 4) or len(held) != count or count < 8:
                continue
            h, w, c = held.shape[1:]
            pairs = [(x, torch.as_tensor(held[i])) for i in range(8) for x in read(loader, i, SEED)]
            pairs = [(x.float(), y.float()) for x, y in pairs if x.shape == (c, h, w)]
            as_is, moved = (
                sum(_related(x, z) for x, z in zip([x for x, _ in pairs], other, strict=True)) / max(1, len(pairs))
                for other in ([y for _, y in pairs], [y.permute(2, 0, 1) for _, y in pairs])
            )
            if as_is > 0.8 and as_is > moved + 0.2:
                text = (
                    f"{path} holds pictures of shape {(h, w, c)}, and samples of {split} the same numbers in the same "
                    f"order as {(c, h, w)}: the axes were renamed, not moved, so rows and channels are mixed."
                )
                yield Finding("pixels_scrambled", text, split, {"in order": as_is, "moved": moved})
                return


def _related(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1].nan_to_num())


def _smoothness(x: Tensor) -> float:
    """How much neighbouring pixels have in common."""
    x = x.float() - x.float().mean((2, 3), keepdim=True)
    both = torch.stack([x[..., 1:].flatten(), x[..., :-1].flatten()])
    return float(torch.corrcoef(both)[0, 1])


def giveaway(patient: Patient) -> Iterator[Finding]:
    """A number of the inputs that is the target."""
    held = stacked(patient, patient.samples)
    if copied := list(_copied(patient, held)):
        yield from copied
        return
    told = places(patient)[1]
    targets = {place: y for place, y in held.items() if place in told or is_target(patient, place)}
    targets = {place: y for place, y in targets.items() if y[0].numel() <= 4}
    if stands := list(_stands_in(targets, held)):
        yield from stands[:1]
        return
    for asked, y in targets.items():
        for column in y.float().reshape(len(y), -1).T:
            if len(column) < 60 or float(column.std()) == 0:
                continue
            for place, x in held.items():
                if place in targets or not x.is_floating_point() or x.ndim < 2 or not 1 < x[0].numel() <= 4096:
                    continue
                flat = x.float().reshape(len(x), -1)
                spread = flat.std(0)
                z = (flat - flat.mean(0)) / spread.clamp_min(1e-9)
                related = (z * ((column - column.mean()) / column.std())[:, None]).mean(0).abs() * (spread > 1e-9)
                told = torch.maximum(related.square(), _told_by(flat, column) * (spread > 1e-9))
                best, *others = told.argsort(descending=True).tolist()[:2]
                alone = not others or float(1 - told[others[0]]) > ALONE * float(1 - told[best])
                if float(related[best]) > 0.985 or (float(told[best]) > TOLD and alone):
                    yield Finding(
                        "label_in_features",
                        f"Number {best} of {flat.shape[1]} in tensor {place} of a sample, shape {tuple(x.shape[1:])}, "
                        f"says {float(told[best]):.1%} of the target, tensor {asked}; the next says "
                        f"{max([0.0, *(float(told[i]) for i in others)]):.1%}.",
                        f"train, tensor {place}",
                        {"number": best, "correlation": float(related[best])},
                        level="warning" if float(related[best]) > 0.985 else "note",
                    )
                    return


def _told_by(inputs: Tensor, column: Tensor) -> Tensor:
    """The share of a target's variance that each number of the inputs explains, as any function of it: sorted by that
    number, neighbours have targets alike. Numbers that occur several times explain nothing here."""
    ranked, order = inputs.sort(dim=0)
    between = column[order].diff(dim=0).square().mean(0) / (2 * column.var())
    return (1 - between).clamp(0, 1) * (ranked.diff(dim=0) > 0).all(0)


def _stands_in(targets: dict[int, Tensor], held: dict[int, Tensor]) -> Iterator[Finding]:
    """A whole number of a sample that another tensor holds, at one place in nearly every sample."""
    whole = {place: x for place, x in held.items() if not (x.is_floating_point() or x.is_complex())}
    for asked, y in whole.items():
        for place, x in whole.items():
            if place in targets or y[0].numel() > 1 or x.ndim != 2 or min(len(y), len(y.unique())) < FEWEST:
                continue
            share = (x == y.reshape(-1, 1)).double().mean(0)
            best = int(share.argmax())
            if float(share[best]) > 0.9:
                text = (
                    f"Number {best} of {x.shape[1]} in tensor {place} of a sample is tensor {asked}, in "
                    f"{float(share[best]):.0%} of {len(y)} samples: the input holds what is to be predicted."
                )
                level = "warning" if asked in targets else "note"
                yield Finding("label_in_features", text, f"train, tensor {place}", {"number": best}, level=level)


def _copied(patient: Patient, held: dict[int, Tensor]) -> Iterator[Finding]:
    """Some numbers of the target that are numbers of the input in every sample, while others are not."""
    asked, told = places(patient)
    for place, x in ((place, held[place]) for place in asked & held.keys()):
        for other, y in ((other, held[other]) for other in told & held.keys()):
            flat, goal = (z.reshape(len(z), -1) for z in (x, y))
            if not (x.is_floating_point() and y.is_floating_point()) or len(x) < FEWEST or len(x) != len(y):
                continue
            if not 1 < goal.shape[1] <= MOST_TARGETS or flat.shape[1] > 4096:
                continue
            same = [(flat == goal[:, i : i + 1]).all(0) & (flat.std(0) > 0) for i in range(goal.shape[1])]
            given = [i for i, found in enumerate(same) if bool(found.any())]
            number = int(same[given[0]].int().argmax()) if given else 0
            if 0 < len(given) < len(same) and _answers_with(patient, place, number, other, given[0]):
                yield Finding(
                    "label_in_features",
                    f"Of the {len(same)} numbers of the target, tensor {other}, {len(given)} stand in the input, "
                    f"tensor {place}, of each of {len(x)} samples: number {given[0]} is number {number} of the input.",
                    f"train, tensor {place}",
                    {"of the target": given[:8]},
                )
                return


def _answers_with(patient: Patient, place: int, number: int, other: int, asked: int) -> bool:
    """Whether the answer that is compared with a number of the target changes with a number of the input."""
    batch = patient.batches[0]
    held, (x, y) = held_of(patient, batch), (tensors(batch)[i] for i in (place, other))
    if held is None:
        return True

    def exchange(z: Tensor, i: int) -> Any:
        def rolled(z: Tensor) -> Tensor:
            flat = z.reshape(len(z), -1).clone()
            flat[:, i] = flat[:, i].roll(1, 0)
            return flat.reshape(z.shape)

        return exchanged(batch, z, rolled)

    now = answers(patient, exchange(x, number))
    judged = zip(held.slopes(), held.slopes(batch=exchange(y, asked)), strict=True)
    moved = zip(held.values, now.values, strict=True) if now is not None else ()
    return any(
        a.shape == b.shape and bool(((a != b) & (g != h)).any()) for (a, b), (g, h) in zip(moved, judged, strict=False)
    )


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
