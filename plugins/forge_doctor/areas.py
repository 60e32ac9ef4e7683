"""Areas: what was examined and found good, in a few groups."""

from __future__ import annotations

from collections.abc import Iterable

from forge import registry
from forge_doctor.probe_order import AFTER, BEFORE, LAST, offered

AREAS = {
    "gradients": ("influence", "graph", "aliases"),
    "loss and metrics": ("reachable", "reading", "loopholes", "partners", "stages", "losses", "measures", "in_fit"),
    "model": ("equivariance", "edges", "tables", "company", "precision"),
    "data": ("values", "columns", "pairs", "collated", "storage", "lossy", "data", "class_labels", "serving"),
    "start and schedule": ("start",),
    "updates": ("scale", "held_out", "motion", "learning"),
}
"""The files of the probes in each area."""


def by_area(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of probes by area, in the order of AREAS, then by the packages that offer others."""
    files = {name: probe.__module__.rpartition(".")[2] for name, probe in (BEFORE | AFTER | LAST).items()}
    found: dict[str, list[str]] = {area: [] for area in AREAS}
    theirs = {name: registry.origin(entry) for name, entry in offered().items()}
    for name in names:
        file = files.get(name, "learning")
        area = theirs.get(name) or next((area for area, inside in AREAS.items() if file in inside), file)
        found.setdefault(area, []).append(name)
    return {area: inside for area, inside in found.items() if inside}
