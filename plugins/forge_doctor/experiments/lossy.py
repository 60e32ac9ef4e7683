"""Lossy: watch operations that silently lose values, while samples are read and while steps run.

Each is done again in a way that loses nothing, and compared: whole numbers that wrap around, differences that are
rounded away, fractions among whole numbers, and several values that are written to one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient
from forge_doctor.stored import count_of, read
from forge_doctor.watch import CallWatch, where

ARITHMETIC = {"add", "add_", "sub", "sub_", "mul", "mul_", "__add__", "__radd__", "__iadd__", "__sub__", "__isub__"}
ARITHMETIC |= {"__mul__", "__rmul__", "__imul__", "__rsub__", "neg", "__neg__", "pow", "__pow__"}
CASTS = {"long", "int", "short", "byte", "char", "to", "type", "type_as", "float", "half", "bfloat16"}
SAMPLES = 6
ROUNDED = 1e-4
"""What rounding may take away, as a share of the deviation."""

FEW, MOST = 0.02, 0.5
"""The share of numbers with a fraction among whole ones, as where a map was interpolated, at which a cast is told."""


class LossyWatch(CallWatch):
    """Notes lines at which values are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, str], str] = {}

    def before(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """In-place arithmetic changes what it is given, which is kept."""
        changes = name in ARITHMETIC and name.endswith(("_", "__")) and _is_whole(args)
        return func, (args[0].detach().clone(), *args[1:]) if changes else args

    def after(self, name: str, args: Any, kwargs: Any, result: Any, noted: Any) -> None:
        func, args = noted
        if name in ARITHMETIC and _is_whole(args) and isinstance(result, Tensor) and result.dtype in WHOLE:
            wide = func(*(x.to(torch.int64) if isinstance(x, Tensor) else x for x in args), **kwargs)
            lost = float((wide != result.to(torch.int64)).float().mean()) if wide.numel() else 0.0
            if lost:
                self._note("overflow", f"{lost:.0%} of the {result.dtype} numbers wrap around in {name.strip('_')}")
        elif name in CASTS and args and isinstance(args[0], Tensor) and isinstance(result, Tensor):
            x = args[0]
            if x.dtype in (torch.int64, torch.float64) and result.dtype in (
                torch.float32,
                torch.float16,
                torch.bfloat16,
            ):
                self._look_at_rounding(x, result, name)
            if x.is_floating_point() and result.dtype in WHOLE[1:] and x.numel() >= 4:  # pictures are bytes
                share = float(((x.detach() - x.detach().round()).abs() > 1e-4).float().mean())
                if FEW < share < MOST:
                    self._note(
                        "truncation",
                        f"{share:.0%} of {x.numel()} numbers, the others of which are whole, lose their fraction in "
                        f"{name}() to {str(result.dtype).removeprefix('torch.')}",
                    )
        elif name == "__setitem__":
            self._look_at_writes(args[0], args[1], args[2])
        elif (
            name in ("scatter", "scatter_")
            and "reduce" not in kwargs
            and len(args) >= 4
            and isinstance(args[3], Tensor)
        ):
            self._repeated(args[2].movedim(args[1], 0).flatten(1)[:, 0], name)

    def _look_at_rounding(self, x: Tensor, result: Tensor, name: str) -> None:
        """Numbers that are large beside what they differ by, such as times, lose that difference."""
        if x.numel() < 4:
            return
        off = (result.detach().double() - x.detach().double()).abs().max()
        spread = float(x.detach().double().std())
        if (
            spread > 1e-9 * float(x.detach().abs().max())  # as much as double itself can tell
            and float(off) > ROUNDED * spread
            and float(off) >= 1e-3 * float(x.detach().double().diff().abs().median())
        ):
            self._note(
                "rounding",
                f"Numbers of about {float(x.detach().abs().max()):.4g}, which differ by {spread:.3g}, are rounded by "
                f"up to {float(off):.3g} in {name}() to {str(result.dtype).removeprefix('torch.')}",
            )

    def _look_at_writes(self, x: Tensor, index: Any, value: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        ids = [part for part in parts if isinstance(part, Tensor) and part.dtype in (torch.int64, torch.int32)]
        if len(ids) == 1 and ids[0].ndim == 1 and isinstance(value, Tensor) and value.requires_grad:
            self._repeated(ids[0], "an assignment by index")

    def _repeated(self, ids: Tensor, what: str) -> None:
        lost = 1 - len(ids.unique()) / max(1, len(ids))
        if lost > 0.05:
            self._note(
                "lost_writes",
                f"{lost:.0%} of the rows that {what} writes are written over by later ones: indices repeat, and "
                "nothing adds them up",
            )

    def _note(self, kind: str, text: str) -> None:
        self.found.setdefault((kind, where()), text)


WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _is_whole(args: Any) -> bool:
    return bool(args) and isinstance(args[0], Tensor) and args[0].dtype in WHOLE[:4]


def reading(patient: Patient) -> Iterator[Finding]:
    """What is lost while the data are made, where a function makes them, and while samples are read."""
    if patient.rebuild is not None:
        with LossyWatch() as watch:
            patient.rebuild()
        yield from _told(watch, "data")
    for split, loader in patient.sources.items():
        total = count_of(loader)
        with LossyWatch() as watch:
            for i in range(0, total, max(1, total // SAMPLES)):
                read(loader, i, SEED + i)
        yield from _told(watch, split)


def steps(patient: Patient) -> Iterator[Finding]:
    """What is lost in a training step and in a validation step."""
    for stage, (batch, *_) in patient.stages:
        task = patient.clone() if stage == "train" else patient.clone().eval()
        with LossyWatch() as watch:
            for name in patient.names if stage == "train" else [None]:
                patient.run(task, batch, stage, name)
        yield from _told(watch, patient.place(stage))


CURES = {
    "rounding": "Subtract the smallest one first, in int64 or float64, and convert the differences.",
    "overflow": "Convert to a wider type first: x.int(), or x.float().",
    "truncation": "Resize maps of classes with mode='nearest'; round before the cast elsewhere: torch.round(x).long().",
    "lost_writes": "Add up what belongs to one index: index_add_, or scatter_add_.",
}


def _told(watch: LossyWatch, place: str) -> Iterator[Finding]:
    for (kind, line), text in list(watch.found.items())[:4]:
        level = "note" if kind == "truncation" else "warning"
        yield Finding("values_lost", f"{text}.", line or place, {"kind": kind}, cure=CURES[kind], level=level)
