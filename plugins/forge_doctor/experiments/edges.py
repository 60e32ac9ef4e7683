"""Edges: where a batch says which rows are joined, what stands in one row must reach those that it is joined to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forge_doctor.experiments.intervene import calls_of, exchanged, named, parts
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient

TRIED, FEWEST = 6, 4
"""Rows that are changed, and those that must tell something."""


def joined(patient: Patient) -> Iterator[Finding]:
    """Change one row after another: some layer must give another value to a row that an edge joins to it."""
    batch = patient.batches[0]
    for path, edges in parts(batch).items():
        if edges.ndim != 2 or len(edges) != 2 or edges.is_floating_point() or edges.dtype == torch.bool:
            continue
        for x in parts(batch).values():
            if not x.is_floating_point() or not x.ndim or not edges.numel() or int(edges.max()) >= len(x):
                continue
            seen = [_reached(patient, batch, x, int(row), edges) for row in _rows(x, edges)]
            told = [found for found in seen if found is not None]
            if len(told) >= FEWEST and not any(told):
                text = (
                    f"What stands in a row of the batch never reaches the rows that {named(path, patient)} joins to "
                    f"it: {len(told)} rows were changed, and no layer gave any other row another value. Messages go "
                    "from each row to itself."
                )
                yield Finding("edges_join_nothing", text, patient.place(), {"rows": len(told)})
            return


def _rows(x: Tensor, edges: Tensor) -> Tensor:
    """Rows with an edge to another row, spread over the batch."""
    apart = edges[0][edges[0] != edges[1]].unique()
    return apart[:: max(1, len(apart) // TRIED)][:TRIED]


def _reached(patient: Patient, batch: Any, x: Tensor, row: int, edges: Tensor) -> bool | None:
    """Whether a change of a row changes another row in a layer's output; None where it changes nothing at all."""
    near = torch.cat([edges[1][edges[0] == row], edges[0][edges[1] == row]]).unique()
    other = exchanged(batch, x, lambda x: _changed(x, row))
    before, after = (calls_of(patient, given, "train")[0] for given in (batch, other))
    own = False
    for key, outs in before.items():
        for a, b in zip(outs, after.get(key, []), strict=False):
            if a.shape != b.shape or not a.ndim or len(a) != len(x):
                continue
            moved = (a != b).flatten(1).any(1) if a.ndim > 1 else a != b
            own = own or bool(moved[row])
            if bool(moved[near[near != row]].any()):
                return True
    return False if own else None


def _changed(x: Tensor, row: int) -> Tensor:
    x[row] = x[row] + x.std() + 0.1 * torch.arange(x[row].numel()).reshape(x[row].shape)
    return x
