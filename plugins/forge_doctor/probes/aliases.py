"""Probes of names and shared weights: misspelt attributes, one memory of two weights, one module several times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches

from torch import nn

from forge_doctor.findings import Finding
from forge_doctor.patient import Patient
from forge_doctor.probes.graph import trained


def attributes(patient: Patient) -> Iterator[Finding]:
    """Attributes of parameters that nearly are `requires_grad`: torch never reads them."""
    for name, p in (patient.original or patient.task).named_parameters():
        wrong = [key for key in vars(p) if get_close_matches(key, ["requires_grad"], 1, 0.85)]
        if wrong:
            text = f"{name} has an attribute {wrong[0]!r}, which torch never reads: did you mean requires_grad?"
            yield Finding("attribute_name", text, name)
            return


def shared_storage(patient: Patient) -> Iterator[Finding]:
    """Two parameters in one memory: each has a gradient and a state of its own, and both are written to it."""
    names = trained(patient)
    seen: dict[tuple[int, int], str] = {}
    for name, p in (patient.original or patient.task).named_parameters():
        place = (p.data_ptr(), p.numel())
        if name not in names or not p.numel() or not p.data_ptr():
            continue
        if place in seen:
            text = (
                f"{seen[place]} and {name} are two parameters in one memory: the optimizer updates it twice, by two "
                "gradients."
            )
            yield Finding("shared_storage", text, name)
            return
        seen[place] = name


def repeated(patient: Patient) -> Iterator[Finding]:
    """Lists of modules that hold one module several times."""
    for path, module in patient.task.named_modules():
        if type(module) not in (nn.ModuleList, nn.Sequential):
            continue
        inner = [child for child in module._modules.values() if child is not None]
        counts = Counter(id(child) for child in inner if any(p.requires_grad for p in child.parameters()))
        if counts and max(counts.values()) > 1:
            times = max(counts.values())
            text = f"{path} holds one module {times} times: its {len(inner)} layers share one set of weights."
            yield Finding("repeated_module", text, path, {"times": times})
            return
