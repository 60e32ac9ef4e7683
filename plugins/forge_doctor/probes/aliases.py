"""Probes of names and shared memory: misspelt attributes, weights that share storage, targets that are the model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, named
from forge_doctor.probes.graph import trained

COPIES = re.compile(r"(^|_)(target|teacher|ema|momentum|averaged|old|reference)(_|$)")
"""Names of modules that are meant to be copies of others."""


def attributes(patient: Patient) -> Iterator[Finding]:
    """Attributes of parameters that nearly are `requires_grad`: torch never reads them."""
    for name, p in (patient.original or patient.task).named_parameters():
        wrong = [key for key in vars(p) if get_close_matches(key, ["requires_grad"], 1, 0.85)]
        if wrong:
            yield Finding(
                "attribute_name",
                f"{name} has an attribute {wrong[0]!r}, which torch never reads: did you mean requires_grad?",
                name,
            )
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
            yield Finding(
                "shared_storage",
                f"{seen[place]} and {name} are two parameters in one memory: the optimizer updates it twice, by two "
                "gradients.",
                name,
            )
            return
        seen[place] = name


def copies_of_modules(patient: Patient) -> Iterator[Finding]:
    """A target or a teacher that is the very module that is trained."""
    places: dict[int, list[str]] = {}
    for path, module in patient.trainer.task.named_modules(remove_duplicate=False):
        if any(p.requires_grad for p in module.parameters()):
            places.setdefault(id(module), []).append(path)
    for paths in places.values():
        wanted = [path for path in paths if COPIES.search(path.rpartition(".")[2])]
        if wanted and len(wanted) < len(paths):
            online = next(path for path in paths if path not in wanted)
            yield Finding(
                "target_is_the_model",
                f"{named(wanted)} is the same module as {online}: it changes with every update.",
                wanted[0],
            )
            return
