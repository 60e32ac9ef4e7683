"""pt2: a graph of torch.export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_ship.export_formats.plan import Plan, traced
from forge_ship.quantize import in_torchs_operators

ABOUT = "torch.export: a graph that Python with torch runs, and other tools read"
PACKAGES = ("torch",)
STRUCTURED = True
FILE = "model.pt2"
TOLERANCE = 1e-5


def write(plan: Plan, path: Path) -> None:
    torch.export.save(in_torchs_operators(traced(plan)), path)


def open_file(path: Path, names: list[str], device: str) -> Callable[[list[Tensor]], Any]:
    model: Any = torch.export.load(path).module()

    def run(inputs: list[Tensor]) -> Any:
        with torch.no_grad():
            return model(*inputs)

    return run
