"""The first step: a look at the data of every split, and at samples that two splits share."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from torch import Tensor

from forge.data.accumulation_windows import batch_size, length_of
from forge_doctor.batch_look import Leaf, look_at
from forge_doctor.batch_show import HEADS, cells, counts, decoder, first_batches, loaders, picture, texts
from forge_doctor.patient import rows
from forge_doctor.ready.planned_run import PlannedRun
from forge_doctor.ready.report import Grid, RoadStep

SHARE = 0.05
"""Of the time of this step, that reading the samples of one split may take."""


def look(run: PlannedRun, step: RoadStep) -> None:
    """Show a batch of each split, count labels and values that are not finite, and compare the splits."""
    seen: dict[str, set[bytes]] = {}
    shown: list[list[str]] = []
    decode = decoder(run.task)
    for split, given in run.loaders.items():
        for label, loader in loaders(given, split) if given is not None else ():
            batch = first_batches(loader, 1, label, run.seed)[0]
            found = look_at([batch])
            shown += [[label, *cells(leaf)] for leaf in found]
            length, size = length_of(loader), batch_size(batch)
            step.facts[label] = {"batches": length, "batch_size": size}
            of = f"batch 1 of {'a stream without a length' if length is None else f'{length:,}'}, {size} samples"
            step.add("good", f"{label}: a batch was read", of, "Only this one was looked at.")
            _values(step, label, found)
            step.texts += [(f"{label} {place}", text) for place, text in texts(found, decode)]
            if (drawn := picture(found, loader)) is not None:
                step.pictures[f"{label.replace('/', '-')}.png"] = drawn[0]
            seen[label] = _samples(loader, time.monotonic() + SHARE * (run.until - time.monotonic()))
    step.grids.append(Grid(["split", *HEADS], shown))
    _leaks(step, seen)
    if run.loaders["val"] is None:
        risk = "Nothing shows when the model begins to overfit."
        step.add("warning", "no validation split", "val is not given", risk)


def _values(step: RoadStep, label: str, found: list[Leaf]) -> None:
    for leaf in found:
        if leaf.nan or leaf.infinite:
            evidence = f"{leaf.nan:,} NaN and {leaf.infinite:,} infinite values of {leaf.entries:,} in {leaf.name}"
            step.add("warning", f"{label}: values that are not finite", evidence, "One of them makes all weights NaN.")
        if leaf.labels:
            what, text = counts(leaf)
            few = min(leaf.labels.values()) * 20 < max(leaf.labels.values())
            risk = "A class that is hardly seen is hardly learnt." if few else "The batch may not be like the others."
            step.add("note" if few else "good", f"{label}: {what} of {leaf.name}", text.replace("  ", ", "), risk)


def _samples(loader: Any, until: float) -> set[bytes]:
    """Return digests of the inputs of the first samples, as many as the time permits: of each, its largest tensor."""
    found: set[bytes] = set()
    for batch in loader:
        for sample in (taken := rows(batch)):
            largest = max(sample, key=Tensor.numel).contiguous().float()
            found.add(hashlib.blake2b(largest.numpy().tobytes(), digest_size=8).digest())
        if time.monotonic() > until or not taken:
            break
    return found


def _leaks(step: RoadStep, seen: dict[str, set[bytes]]) -> None:
    for label, own in seen.items():
        if label == "train" or not own:
            continue
        step.facts[label]["shared_with_train"] = shared = len(own & seen["train"])
        of = f"{shared:,} of {len(own):,} inputs of {label} are among {len(seen['train']):,} of train that were read"
        if shared:
            risk = "A result on these samples says nothing of new ones: it is too good."
            step.add("warning", f"{label} shares samples with train", of, risk)
        else:
            risk = "Near copies are not seen here; the doctor looks for them."
            step.add("good", f"{label}: no sample of train", of, risk)
