"""Probes of labels and targets: their counts, their order, and features that give them away."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from forge_doctor.findings import Finding
from forge_doctor.patient import Patient
from forge_doctor.probes.data import sampler_of


def labels(patient: Patient) -> Iterator[Finding]:
    """Class labels: their counts, their order, and features that give them away."""
    labels, call = patient.labels, patient.class_loss
    if labels is None or call is None or len(labels) < 30:
        return
    used = labels[labels != call.given.get("ignore_index", -100)]
    is_binary = call.name.startswith("binary")
    outputs = 2 if is_binary else call.input.shape[1] if call.input.ndim > 1 else 0
    counts = torch.bincount(used[used >= 0], minlength=outputs)
    absent = [i for i in range(outputs) if not counts[i]]
    if absent and outputs <= 200 and len(used) >= 40 * outputs:
        text = (
            f"{outputs} outputs, but {len(absent)} of the classes never occur in {len(used)} training labels: "
            f"{', '.join(map(str, absent[:6]))}. Labels run from {int(used.min())} to {int(used.max())}."
        )
        yield Finding("missing_class", text, call.where, {"absent": absent[:20], "counts": counts.tolist()[:50]})
    share = float(counts.max()) / max(1, len(used))
    weighted = call.given.get("weight") is not None or call.given.get("pos_weight") is not None
    weighted = weighted or "Weighted" in sampler_of(patient)
    if share >= 0.95 and not weighted and len(used) >= 100:
        text = (
            f"{share:.1%} of the training labels are class {int(counts.argmax())}: always answering it scores "
            f"{share:.1%}."
        )
        yield Finding("imbalance", text, "train", {"share": share, "counts": counts.tolist()[:20]})
    if int((counts > 0).sum()) > 1:
        yield from _order(used, counts)


def _order(labels: Tensor, counts: Tensor) -> Iterator[Finding]:
    changes = int((labels[1:] != labels[:-1]).sum())
    share = (counts / counts.sum()).pow(2).sum()
    expected = float((1 - share) * (len(labels) - 1))
    if expected > 20 and changes < 0.15 * expected:
        text = (
            f"Neighbouring training samples have one label: {changes} changes in {len(labels)} samples, where a "
            f"shuffled order has about {expected:.0f}."
        )
        yield Finding("not_shuffled", text, "train", {"changes": changes, "expected": expected})
