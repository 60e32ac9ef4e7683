"""Values: what each split holds: NaN, infinities, columns that never change, labels that train never saw."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from forge_doctor.experiments.intervene import exchanged, says
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, tensors
from forge_doctor.probes.data import is_target, stacked
from forge_doctor.stored import indexed

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
                + ("The loss is not a number then." if spoils else "The step leaves them out: its numbers are finite."),
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
            yield Finding(
                "values_unseen",
                f"{share:.0%} of the labels of val, tensor {place}, never occur in train: {new.tolist()[:6]}; those of "
                f"train run from {int(known.min())} to {int(known.max())}.",
                "val",
                {"share": share, "new": new.tolist()[:20]},
            )


def constant(patient: Patient) -> Iterator[Finding]:
    """Columns of train that never change though others do; columns that vary in one split alone."""
    train, val = stacked(patient, patient.samples), stacked(patient, patient.val_samples)
    for place, x in train.items():
        if x.ndim != 2 or not x.is_floating_point() or not 2 <= x.shape[1] <= 512 or len(x) < FEWEST:
            continue
        still = (x == x[:1]).all(0)
        if bool(still.all()) or not bool(still.any()):
            continue
        y = val.get(place)
        moves = [
            int(i)
            for i in still.nonzero().flatten()
            if y is not None and y.shape[1] == x.shape[1] and not bool((y[:, i] == x[0, i]).all())
        ]
        if moves:
            yield Finding(
                "split_statistics",
                f"Columns {moves[:6]} of tensor {place} are constant in train and vary in val.",
                "val",
                {"columns": moves[:20]},
            )
        elif int(still.sum()) <= x.shape[1] // 2:
            yield Finding(
                "constant_column",
                f"Columns {[int(i) for i in still.nonzero().flatten()[:6]]} of tensor {place}, of {x.shape[1]}, have "
                "one value in all training samples.",
                "train",
                {"columns": int(still.sum())},
            )


def in_step(patient: Patient) -> Iterator[Finding]:
    """What the step itself makes: NaN or infinities in what layers give, where the batch has none."""
    from forge_doctor.experiments.intervene import calls_of

    for stage, batches in (("train", patient.batches), ("val", patient.val_batches if patient.can_validate else [])):
        for batch in batches:
            if any(x.is_floating_point() and not bool(x.isfinite().all()) for x in tensors(batch)):
                continue
            calls, said = calls_of(patient, batch, stage)
            layer = next((path for (path, _), out in calls.items() if any(_is_bad(x) for x in out)), None)
            lost = [name for name, value in said.items() if value != value]
            if layer or lost:
                yield Finding(
                    "bad_values",
                    f"{layer or ', '.join(lost)} gives NaN or an infinity in {stage}, for a batch without any.",
                    layer or f"{type(patient.task).__name__}.{stage}",
                    {"stage": stage},
                )
                return


def _is_bad(x: Tensor) -> bool:
    return not bool(x.isfinite().all())


def layout(patient: Patient) -> Iterator[Finding]:
    """Pictures whose numbers are laid out as (height, width, channels) and read as (channels, height, width)."""
    from forge_doctor.probes.data import _inputs_of_layers

    for path, x in _inputs_of_layers(patient)[:1]:
        if x.ndim != 4 or x.shape[1] not in (3, 4) or min(x.shape[2:]) < 8 or len(x) < 4:
            continue
        n, c, h, w = x.shape
        other = x.contiguous().reshape(n, h, w, c).permute(0, 3, 1, 2)
        mine, theirs = _smoothness(x), _smoothness(other)
        if theirs > 0.5 and mine < 0.4 * theirs:
            yield Finding(
                "pixels_scrambled",
                f"The pictures that reach {path} look scrambled: neighbouring pixels correlate by {mine:.2f}, and by "
                f"{theirs:.2f} if the same numbers are read as (height, width, channels).",
                path,
                {"as given": mine, "as height, width, channels": theirs},
            )


def _smoothness(x: Tensor) -> float:
    """How much neighbouring pixels have in common."""
    x = x.float() - x.float().mean((2, 3), keepdim=True)
    both = torch.stack([x[..., 1:].flatten(), x[..., :-1].flatten()])
    return float(torch.corrcoef(both)[0, 1])


def giveaway(patient: Patient) -> Iterator[Finding]:
    """A number of the inputs that is the target."""
    held = stacked(patient, patient.samples)
    targets = {place: y for place, y in held.items() if is_target(patient, place) and y[0].numel() <= 4}
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
                best = int(related.argmax())
                if float(related[best]) > 0.985:
                    yield Finding(
                        "label_in_features",
                        f"Number {best} of {flat.shape[1]} in tensor {place} of a sample, shape {tuple(x.shape[1:])}, "
                        f"is the target, tensor {asked}: their correlation is {float(related[best]):.4f}.",
                        f"train, tensor {place}",
                        {"number": best, "correlation": float(related[best])},
                    )
                    return


def told_apart(patient: Patient) -> Iterator[Finding]:
    """Whether a simple model tells the samples of val from those of train."""
    from forge_doctor.probes.reference import MODELS, Table, crossed, table

    train, val = table(patient, patient.samples), table(patient, patient.val_samples)
    if train is None or val is None or train.x.shape[1] != val.x.shape[1]:
        return
    count = min(len(train), len(val))
    if count < 60:
        return
    x, side = torch.cat([train.x[:count], val.x[:count]]), torch.zeros(2 * count, 2)
    side[:count, 0] = side[count:, 1] = 1
    for name, model in MODELS.items():
        right = 0.5 + crossed(model, Table(x, side, True)) / 2
        if right > 0.9:
            yield Finding(
                "split_statistics",
                f"The inputs of val are not like those of train: {name} tells by a sample's inputs which split it is "
                f"of, in {right:.0%} of the cases. Encodings, scales or preparation differ.",
                "val",
                {"right": right},
                level="note",
            )
            return


def spreads(patient: Patient) -> Iterator[Finding]:
    """Columns that are squeezed beside the others, and single values far away from all others."""
    for place, x in stacked(patient, patient.samples).items():
        if (
            x.ndim != 2
            or not x.is_floating_point()
            or not 3 <= x.shape[1] <= 512
            or len(x) < 100
            or is_target(patient, place)
        ):
            continue
        quarter = x.float().quantile(0.9, 0) - x.float().quantile(0.1, 0)
        spread = x.float().std(0)
        many = torch.tensor([len(column.unique()) > 20 for column in x.T])
        squeezed = [int(i) for i in (many & (quarter < 0.15 * spread)).nonzero().flatten()]
        narrow = (
            [int(i) for i in (many & (spread < 0.05 * spread[many].median())).nonzero().flatten()]
            if bool(many.any())
            else []
        )
        if squeezed:
            worst = min(squeezed, key=lambda i: float(quarter[i] / spread[i]))
            column = x[:, worst].float()
            yield Finding(
                "feature_scales",
                f"Columns {squeezed[:6]} of tensor {place} are squeezed: 80 % of column {worst} lie within "
                f"{float(quarter[worst]):.2g}, and it reaches from {float(column.min()):.4g} to "
                f"{float(column.max()):.4g}. "
                "Outliers or placeholders set its scale.",
                f"train, tensor {place}",
                {"columns": squeezed[:20]},
                level="note",
            )
        elif narrow:
            yield Finding(
                "feature_scales",
                f"Columns {narrow[:6]} of tensor {place} have deviations below a twentieth of the others' "
                f"({float(spread[narrow[0]]):.2g} against {float(spread[many].median()):.2g}).",
                f"train, tensor {place}",
                {"columns": narrow[:20]},
                level="note",
            )


def same_tensors(patient: Patient) -> Iterator[Finding]:
    """Two tensors of a sample that are the same in all samples."""
    held = stacked(patient, patient.samples[:200])
    for a, x in held.items():
        for b, y in held.items():
            if a < b and x.shape == y.shape and x[0].numel() > 1 and len(x) >= 8 and torch.equal(x.float(), y.float()):
                yield Finding(
                    "same_tensors",
                    f"Tensors {a} and {b} of a sample are the same in all of {len(x)} samples: two views, or a noisy "
                    "input and its target, should differ.",
                    "train",
                    {"tensors": [a, b]},
                )
                return


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
    if share < 0.35:
        yield Finding(
            "dropped_data",
            f"An epoch draws {len(drawn)} of the {len(dataset)} samples of train: the sampler, "
            f"{type(getattr(loader, 'sampler', sampler)).__name__}, leaves the others out.",
            "train",
            {"drawn": len(drawn), "samples": len(dataset)},
            cure="Give a weighted sampler one weight for each sample, and as many draws as samples.",
            level="warning" if share < 0.1 else "note",
        )


def first_inputs(patient: Patient) -> Iterator[Finding]:
    """Columns that reach the first layer with one value for all samples of all batches, where others vary."""
    from forge_doctor.probes.data import _inputs_of_layers

    seen = _inputs_of_layers(patient)[:1]
    for path, x in seen:
        if x.ndim != 2 or not 2 <= x.shape[1] <= 512 or len(x) < 16:
            continue
        still = (x == x[:1]).all(0)
        if bool(still.any()) and not bool(still.all()):
            columns = still.nonzero().flatten().tolist()
            yield Finding(
                "constant_column",
                f"{path}, the first layer, gets one value ({float(x[0, columns[0]]):.4g}) in column {columns[0]} of "
                f"{x.shape[1]} for all {len(x)} samples of a batch ({len(columns)} such columns).",
                path,
                {"columns": columns[:20]},
            )
