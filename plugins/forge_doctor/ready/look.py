"""The first step: a look at the data of every split, and at samples that two splits share."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from torch import Tensor

from forge.data.accumulation_windows import batch_size, length_of
from forge.runs.wording import counted
from forge_doctor.batch_look import Leaf, look_at
from forge_doctor.batch_show import HEADS, cells, counts, decoder, first_batches, loaders, picture, texts
from forge_doctor.patient import rows
from forge_doctor.ready.planned_run import PlannedRun
from forge_doctor.ready.report import Grid, RoadStep

SAMPLES = 3000
"""Samples of each split that are compared with the others."""
SHARE = 0.3
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
            _size(step, label, loader, batch)
            _values(step, label, found)
            step.texts += [(f"{label} {place}", text) for place, text in texts(found, decode)]
            if (drawn := picture(found, loader)) is not None:
                step.pictures[f"{label.replace('/', '-')}.png"] = drawn[0]
            seen[label] = _samples(loader, time.monotonic() + SHARE * (run.until - time.monotonic()))
    step.grids.append(Grid(["split", *HEADS], shown))
    _leaks(step, seen)
    if "val" not in {label.partition("/")[0] for label in seen}:
        step.add(
            "warning", "no validation split", "val is not given", "Nothing shows when the model begins to overfit."
        )


def _size(step: RoadStep, label: str, loader: Any, batch: Any) -> None:
    length, size = length_of(loader), batch_size(batch)
    of = (
        "of a stream without a length"
        if length is None
        else f"of {counted(length, 'batch').replace('batchs', 'batches')}"
    )
    step.facts[label] = {"batches": length, "batch_size": size}
    step.add(
        "good", f"{label}: a batch was read", f"{size} samples, the first {of}", "Only the first batch was looked at."
    )


def _values(step: RoadStep, label: str, found: list[Leaf]) -> None:
    for leaf in found:
        if leaf.nan or leaf.infinite:
            evidence = f"{leaf.nan:,} NaN and {leaf.infinite:,} infinite values of {leaf.entries:,} in {leaf.name}"
            step.add("warning", f"{label}: values that are not finite", evidence, "One of them makes all weights NaN.")
        if leaf.labels:
            what, text = counts(leaf)
            text = text.replace("  ", ", ")
            few = min(leaf.labels.values()) * 20 < max(leaf.labels.values())
            risk = "A class that is hardly seen is hardly learnt." if few else "The batch may not be like the others."
            step.add("note" if few else "good", f"{label}: {what} of {leaf.name}", text, risk)


def _samples(loader: Any, until: float) -> set[bytes]:
    """Return digests of the inputs of the first samples: of each, its largest tensor."""
    found: set[bytes] = set()
    read = 0
    for batch in loader:
        for sample in rows(batch):
            largest = max(sample, key=Tensor.numel)
            found.add(hashlib.blake2b(largest.contiguous().float().numpy().tobytes(), digest_size=8).digest())
            read += 1
        if read >= SAMPLES or time.monotonic() > until or not read:
            break
    return found


def _leaks(step: RoadStep, seen: dict[str, set[bytes]]) -> None:
    for label, own in seen.items():
        shared = len(own & seen["train"])
        if label == "train" or not own:
            continue
        of = f"{shared:,} of the first {len(own):,} inputs of {label} are among {len(seen['train']):,} of train"
        step.facts[label]["shared_with_train"] = shared
        if shared:
            risk = "A result on these samples says nothing of new ones: it is too good."
            step.add("warning", f"{label} shares samples with train", of, risk)
        else:
            step.add(
                "good", f"{label}: no sample of train", of, "Near copies are not seen here; the doctor looks for them."
            )
