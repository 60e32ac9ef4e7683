"""Tables: which rows a step looks up: that of padding at the ends of samples alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from forge_doctor.findings import Finding
from forge_doctor.patient import Patient

BETWEEN = 0.2
"""The share of samples that may have padding between words, as where some of them are left out."""


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
