"""Probes of the data: copies, splits, scales, labels and order."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from forge.data.protocols import is_live
from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient, tensors
from forge_doctor.stored import Sample, arrays, count_of, read
from forge_doctor.watch import REGRESSION

SHIFTED = 3.0
"""Deviations by which the means of val may differ before that cannot be a later time, or another place."""
FAR = 10.0
"""Of the narrower split, where the means of one number differ: another unit."""
REREAD, READS = 64, 6
"""Samples of train that are read again, and how often, to see what augmentation changes."""
MOST_IDS = 20_000
"""Samples of stored arrays that are looked up."""
STEPS, MOST_LENGTH = 8, 2000
"""Steps of a stretch of a series that is looked up, and those of a window at most."""


def copies(patient: Patient) -> Iterator[Finding]:
    """Samples that occur more than once, within train and across the splits."""
    train, val = _hashes(patient.samples), _hashes(patient.val_samples)
    counts = Counter(train)
    if not train:
        return
    repeated = 1 - len(counts) / len(train)
    again = sum(1 for key in train if counts[key] > 1) / len(train)
    draws_again = "Weighted" in sampler_of(patient) or getattr(
        getattr(patient.train, "sampler", None), "replacement", False
    )
    whole = all(not x.is_floating_point() for x in patient.samples[0])
    usual = 0.8 if draws_again else 0.6 if whole else 0.3
    counted = whole or len(counts) <= 2 or _is_rich(patient, len(counts))  # a table of few values repeats by chance
    is_served = len(set(counts.values())) == 1  # all alike: by the loader, not in the data
    lives = is_live(patient.train)  # several passes over what was collected, or draws of it
    if len(train) >= 16 and repeated > usual and counted and (not lives or len(counts) <= 2):
        top = max(counts.values())
        yield Finding(
            "duplicates",
            f"{repeated:.0%} of {len(train)} training samples are copies of others in the same epoch; one occurs {top} "
            "times.",
            "train",
            {"samples": len(train), "different": len(counts), "most": top},
            level="error" if len(counts) <= 2 else "warning" if is_served and not _is_drawn(patient) else "note",
        )
    both = sum(1 for key in val if key in counts)
    shared = both / len(val) if val else 0.0
    if both < 8 or len(counts) <= 4:
        return
    if shared < 0.02 or (shared < 3 * again + 0.02 and not _has_own_values(patient, len(counts))):
        yield from _copies_of_a_class(patient, val, counts)
        return
    text = f"{shared:.0%} of {len(val)} validation samples are training samples."
    yield Finding("val_is_train" if shared > 0.5 else "leakage", text, "val", {"share": shared, "samples": both})


def _is_drawn(patient: Patient) -> bool:
    """Whether a sampler of the user's own decides which samples come how often."""
    made = [getattr(patient.train, name, None) for name in ("sampler", "batch_sampler")]
    return any(x is not None and not type(x).__module__.startswith(("torch.", "forge.")) for x in made)


def _copies_of_a_class(patient: Patient, val: list[bytes], train: Counter[bytes]) -> Iterator[Finding]:
    """A class that was multiplied before the split: its samples are in both splits, those of the others are not."""
    labels = patient.labels_of(patient.val_samples)
    if labels is None or len(labels) != len(val):
        return
    is_copy = torch.tensor([key in train for key in val])
    different = len({key for key in val if key in train})
    shares = {int(c): float(is_copy[labels == c].float().mean()) for c in labels.unique() if (labels == c).sum() >= 10}
    if len(shares) < 2 or different < 5 or not _is_rich(patient, len(train)):
        return
    most, least = max(shares, key=lambda c: shares[c]), min(shares, key=lambda c: shares[c])
    if shares[most] >= 0.5 and shares[least] <= 0.05:
        text = (
            f"{shares[most]:.0%} of the validation samples of class {most} are training samples, and "
            f"{shares[least]:.0%} of class {least}: the class was multiplied before the split."
        )
        yield Finding("leakage", text, "val", {"shares": shares, "different": different})


def _is_rich(patient: Patient, different: int) -> bool:
    """Whether samples do not repeat by chance: a column with a value for each of them, or many columns that vary."""
    counts = [_kinds(x) for x in stacked(patient, patient.samples).values() if x.is_floating_point() and x[0].numel()]
    if any(int((values > 1).sum()) >= 32 for values in counts):
        return True
    return _has_own_values(patient, different) or not stacked(patient, patient.samples)


def _has_own_values(patient: Patient, different: int) -> bool:
    """Whether a column has a value for each sample, as measured numbers do: another sample with it is a copy."""
    held = [x for x in stacked(patient, patient.samples).values() if x.is_floating_point() and x[0].numel()]
    return any(int(_kinds(x).max()) >= 0.5 * different for x in held)


def _kinds(x: Tensor) -> Tensor:
    """How many different values each of the first columns has."""
    return torch.tensor([len(column.unique()) for column in x.reshape(len(x), -1)[:, :64].T])


def _hashes(samples: list[Sample]) -> list[bytes]:
    return [
        hashlib.blake2b(b"".join(_bytes(x) for x in sample), digest_size=12).digest() for sample in samples if sample
    ]


def _bytes(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b""


def scales(patient: Patient) -> Iterator[Finding]:
    """The values of inputs, in the samples and where they reach the first layer."""
    path, reaches = patient.first_input or ("", None)
    for place, x in stacked(patient, patient.samples).items():
        if is_target(patient, place) or x.ndim < 2 or x.dtype == torch.bool or reaches is None:
            continue
        where = f"train, tensor {place} of a sample"
        if x.is_floating_point() and float(x.max()) == float(x.min()):
            yield Finding("constant_input", f"All inputs are {float(x.max()):g}.", where, {"value": float(x.max())})
        elif _is_far(x) and _is_far(reaches):
            centre, deviation = float(reaches.float().mean()), float(reaches.float().std())
            yield Finding(
                "unscaled_inputs",
                f"{path}, the first layer, gets inputs of mean {centre:.4g} and deviation {deviation:.4g}; networks "
                "want about 0 and 1.",
                where,
                {"mean": centre, "deviation": deviation, "lowest": float(x.min()), "highest": float(x.max())},
            )
        elif (spread := _columns(x)) is not None and _columns(reaches) is not None:
            text = (
                f"Columns of the inputs have deviations from {spread[0]:.3g} to {spread[1]:.3g}: the largest drown the "
                "others."
            )
            yield Finding("feature_scales", text, where, {"smallest": spread[0], "largest": spread[1]})


def _is_far(x: Tensor) -> bool:
    deviation, centre = float(x.float().std()), float(x.float().mean())
    return deviation > 15 or abs(centre) > 30 * max(deviation, 1e-6)


def _columns(x: Tensor) -> tuple[float, float] | None:
    """The least and the largest deviation of columns, where that is far above the others'."""
    moving = x.float().std(0) if x.ndim == 2 and x.is_floating_point() and 1 < x.shape[1] <= 4096 else x.new_zeros(0)
    moving = moving[moving > 0]
    far = len(moving) > 1 and float(moving.max() / moving.median()) > 300
    return (float(moving.min()), float(moving.max())) if far else None


def targets(patient: Patient) -> Iterator[Finding]:
    """The values of regression targets."""
    for call in patient.watched.losses:
        if call.name in REGRESSION and isinstance(call.target, Tensor) and call.target.numel() > 1:
            y = call.target.detach().float()
            spread = float(y.std()) if y.numel() > 1 else 0.0
            if spread > 50 or abs(float(y.mean())) > max(200 * spread, 20):
                text = (
                    f"Targets of {call.name} have mean {float(y.mean()):.4g} and deviation {spread:.4g}; an untrained "
                    "network predicts about 0."
                )
                yield Finding("target_scale", text, call.where, {"mean": float(y.mean()), "deviation": spread})
                return


def stacked(patient: Patient, samples: list[Sample]) -> dict[int, Tensor]:
    """Samples by place, where all have one shape."""
    found: dict[int, Tensor] = {}
    for place in range(len(samples[0]) if samples else 0):
        rows = [sample[place] for sample in samples if len(sample) > place]
        if len({row.shape for row in rows}) == 1:
            found[place] = torch.stack(rows)
    return found


def is_target(patient: Patient, place: int) -> bool:
    """Whether a tensor of a sample is the target of a loss."""
    x = tensors(patient.batches[0])[place] if place < len(tensors(patient.batches[0])) else None
    for call in patient.watched.losses:
        y = call.target
        if x is None or not isinstance(y, Tensor) or x.numel() != y.numel():
            continue
        if bool((x.flatten().float() == y.flatten().float()).all()):
            return True
    return False


def splits(patient: Patient) -> Iterator[Finding]:
    """Inputs of val against those of train."""
    if not patient.val_samples or not patient.samples or len(patient.val_samples[0]) != len(patient.samples[0]):
        return  # validation is of something else, as starts of a simulation
    train, val = stacked(patient, patient.samples), stacked(patient, patient.val_samples)
    for place, x in train.items():
        y = val.get(place)
        if y is None or not x.is_floating_point() or x.shape[1:] != y.shape[1:] or len(y) < 20:
            continue
        as_target = is_target(patient, place)
        if x[0].numel() < 2 and not as_target:
            continue
        x, y = _by_column(x), _by_column(y)
        most = 4.0 if as_target else 2.0
        shift, factor, differ = _compared(x, y, most, x.std(0))
        if differ:
            drawn = not _compared(x, y, most, *_read_again(patient, place, x))[2]
            text = (
                f"{'Targets' if as_target else 'Inputs'} of val differ from those of train: means by {shift:.2g} "
                f"deviations, deviations by a factor of {factor:.3g}; most in {_most(x, y)}."
                + " Reading the same samples of train again moves them by as much: augmentation."
                * drawn
            )
            cure = "Nothing, if train is meant to vary more than val." if drawn else ""
            level = "warning" if not drawn and (shift > SHIFTED or not 1 / 2 < factor < 2) else "note"
            yield Finding("split_statistics", text, "val", {"shift": shift, "factor": factor}, cure, level)
            return


def _compared(x: Tensor, y: Tensor, most: float, own: Tensor, moved: Tensor | float = 0.0) -> tuple[float, float, bool]:
    """By how much means and deviations differ, and whether that is certain and much.

    `own` is the least deviation that train has, `moved` what reading a sample again changes it by.
    """
    spread, apart = x.std(0).clamp_min(1e-6), (x.mean(0) - y.mean(0)).abs()
    error = spread * (1 / len(x) + 1 / len(y)) ** 0.5
    shift = float((apart / spread).mean())
    certain = bool(((apart > 8 * error) & (apart > 2 * moved)).float().mean() > 0.5)
    least, factor = (float((y.std(0).clamp_min(1e-6) / z.clamp_min(1e-6)).log().mean().exp()) for z in (own, spread))
    low, high = torch.minimum(spread, y.std(0)), torch.maximum(spread, y.std(0))
    alone = bool(((apart > SHIFTED * high) & (apart > FAR * low)).any())  # one column in other units
    differ = (certain and shift > most / 4) or least < 1 / most or factor > most or alone
    return shift, factor, differ and math.isfinite(shift + factor)  # one NaN would say that all differ


def _most(x: Tensor, y: Tensor) -> str:
    """The number of a sample by which two splits differ most."""
    worst = int(((x.mean(0) - y.mean(0)).abs() / x.std(0).clamp_min(1e-6)).argmax())
    (a, c), (b, d) = ((float(z[:, worst].mean()), float(z[:, worst].std())) for z in (x, y))
    return f"number {worst}, {a:.3g} ± {c:.2g} in train and {b:.3g} ± {d:.2g} in val"


def _read_again(patient: Patient, place: int, x: Tensor) -> tuple[Tensor, Tensor | float]:
    """The deviation between samples of train, without what reading one of them again changes it by; and that."""
    total = count_of(patient.train) if patient.reads else 0
    served = [
        torch.stack([_by_column(read(patient.train, i, SEED + READS * i + k)[place][None])[0] for k in range(READS)])
        for i in range(0, total, max(1, total // REREAD))
    ]
    if len(served) < 8 or served[0].shape[1:] != x.shape[1:]:
        return x.std(0), 0.0
    z = torch.stack(served)
    within = z.var(1).mean(0)
    return (z.mean(1).var(0) - within / READS).clamp_min(0).sqrt(), within.sqrt()


def _by_column(x: Tensor) -> Tensor:
    """Samples as rows of numbers: those of a picture by channel."""
    return x.float().flatten(2).mean(2) if x.ndim > 2 else x.float()


def sampler_of(patient: Patient) -> str:
    return type(getattr(patient.train, "sampler", None)).__name__


def dropped(patient: Patient) -> Iterator[Finding]:
    """Samples that drop_last leaves out."""
    for stage, loader in patient.sources.items():
        dataset, size = getattr(loader, "dataset", None), getattr(loader, "batch_size", None)
        if dataset is None or not size or not getattr(loader, "drop_last", False) or not hasattr(dataset, "__len__"):
            continue
        sampler = getattr(loader, "sampler", None)
        count = len(sampler) if sampler is not None and hasattr(sampler, "__len__") else len(dataset)
        left = count % size
        if count and left / count > 0.1:
            text = f"drop_last leaves out {left} of {count} samples of {stage} every time, at a batch size of {size}."
            yield Finding("dropped_data", text, stage, {"dropped": left, "samples": count})


def overlaps(patient: Patient) -> Iterator[Finding]:
    """Windows of one series, cut before the split: those of val begin and end inside those of train.

    Neither is possible for all windows of a later time. A series that repeats itself is left out.
    """
    for x, y in _both(patient):
        if not x.is_floating_point() or x.ndim not in (2, 3) or x.shape[1:] != y.shape[1:] or len(y) < 20:
            continue
        for dim in range(1, x.ndim):  # time may be either
            if not STEPS + 2 <= x.shape[dim] <= MOST_LENGTH or float((x != x.round()).float().mean()) < 0.5:
                continue
            a, b = (_stretches(z.movedim(dim, 1).double()) for z in (x, y))
            begin, end = (
                float(torch.isin(*pair).float().mean()) for pair in ((b[:, 0], a[:, 1:]), (b[:, -1], a[:, :-1]))
            )
            if begin >= 0.5 and end >= 0.5 and len(a[:400, 0].unique()) >= 0.95 * len(a[:400]):
                text = (
                    f"Windows of val and of train overlap: {begin:.0%} of {len(b)} validation windows begin, and "
                    f"{end:.0%} end, with {STEPS} steps that a training window holds at another offset."
                )
                cure = "Split the series by time first, and cut each part into windows."
                yield Finding("leakage", text, "val", {"begin": begin, "end": end, "windows": len(b)}, cure=cure)
                return


def _both(patient: Patient) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples of train and of val by place; and as they are stored, where augmentation changes what is served."""
    train, val = (stacked(patient, samples) for samples in (patient.samples, patient.val_samples))
    yield from ((x, val.get(place, x[:0])) for place, x in train.items())
    stored = [arrays(x) if patient.reads and x is not None else {} for x in patient.loaders.values()]
    for path in (path for path in stored[0].keys() & stored[1].keys() if stored[0][path].ndim and stored[1][path].ndim):
        yield torch.as_tensor(stored[0][path])[:MOST_IDS], torch.as_tensor(stored[1][path])[:MOST_IDS]


def _stretches(x: Tensor) -> Tensor:
    """One number for each stretch of steps, the same for the same numbers; NaN where hardly anything moves."""
    drawn = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    zero = torch.zeros((), dtype=torch.float64)
    channels = x.flatten(2).unbind(2) if x.ndim > 2 else [x]
    steps = sum((w * c for w, c in zip(drawn, channels, strict=False)), zero)
    count = x.shape[1] - STEPS + 1
    keys = sum((w * steps[:, i : i + count] for i, w in enumerate(drawn[:STEPS])), zero)
    moves = (steps[:, 1:] != steps[:, :-1]).unfold(1, STEPS - 1, 1).sum(-1)
    return keys.where(moves > STEPS // 2, torch.nan)
