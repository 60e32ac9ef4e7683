"""Tables: which rows a step looks up: all of those that it draws from, and that of padding at the ends alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient
from forge_doctor.watch import CallWatch, where

RUNS, PARTS, ENOUGH = 24, 10, 20
"""Steps that draw, parts that a table is divided into, and draws that each part must expect to be judged by."""
RARE = 0.1
"""The share of its fair number of draws below which a part is left out."""
BETWEEN = 0.2
"""The share of samples that may have padding between words, as where some of them are left out."""

Place = tuple[str, int, int]
"""The line, which of its look-ups, and the rows of the table."""


class LookUps(CallWatch):
    """Notes which rows of tables a step looks up, by line."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Place, Tensor] = {}
        self._counts: Counter[tuple[str, int]] = Counter()

    def after(self, name: str, args: Any, kwargs: Any, result: Any, noted: Any) -> None:
        if name == "embedding" and len(args) > 1:
            key = where(), len(args[1])
            self.found[key[0], self._counts[key], key[1]] = args[0].detach().flatten().clone()
            self._counts[key] += 1


def drawn(patient: Patient) -> Iterator[Finding]:
    """Run one batch with many seeds: rows that differ are drawn, and every part of the table must be among them."""
    task, seen = patient.clone(), list[dict[Place, Tensor]]()
    for run in range(RUNS):
        with LookUps() as watch:
            patient.run(task, patient.batches[0], seed=SEED + run)
        seen.append(watch.found)
        if not watch.found or (run == 1 and not _drawn(seen)):
            return
    for place in _drawn(seen):
        line, _, rows = place
        ids = torch.cat([found[place] for found in seen if place in found])
        shares = torch.bincount(ids * PARTS // rows, minlength=PARTS) / len(ids) * PARTS
        left_out = int((shares < RARE).sum())
        if rows >= PARTS and len(ids) >= ENOUGH * PARTS and left_out >= 2:
            text = (
                f"The step draws rows of a table of {rows} at {line}, and {left_out} tenths of it are hardly ever "
                f"among {len(ids)} draws (they run from {int(ids.min())} to {int(ids.max())}; half of them are below "
                f"{int(ids.median())})."
            )
            yield Finding("rows_never_drawn", text, line, {"rows": rows, "tenths": left_out})
            return


def _drawn(seen: list[dict[Place, Tensor]]) -> list[Place]:
    """Look-ups whose rows differ between seeds."""
    one, other = seen[0], seen[-1]
    return [p for p in one if p in other and (one[p].shape != other[p].shape or not torch.equal(one[p], other[p]))]


def padding_between(patient: Patient) -> Iterator[Finding]:
    """The row of padding is looked up behind or before the words of a sample, never between them."""
    task, seen = patient.clone(), dict[str, Tensor]()

    def note(path: str) -> Any:
        return lambda module, args: seen.update({path: args[0].detach()})

    tables = {path: m for path, m in task.named_modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None}
    for path, table in tables.items():
        table.register_forward_pre_hook(note(path))
    patient.run(task, patient.batches[0])
    for path, ids in seen.items():
        is_pad = ids == tables[path].padding_idx
        if ids.ndim != 2 or not bool(is_pad.any()):
            continue
        share = min(_between(is_pad), _between(is_pad.T))  # samples may be rows, or columns
        if share > BETWEEN:
            text = (
                f"Row {tables[path].padding_idx} of {path}, that of padding, stands between words in {share:.0%} of "
                "samples: a word has the number of padding, and its row is never trained."
            )
            yield Finding("padding_is_a_word", text, path, {"share": share})
            return


def _between(is_pad: Tensor) -> float:
    """The share of rows in which padding stands between words."""
    words = (~is_pad).long()
    between = is_pad & (words.cumsum(1) > 0) & (words.flip(1).cumsum(1).flip(1) > 0)
    return float(between.any(1).float().mean())
