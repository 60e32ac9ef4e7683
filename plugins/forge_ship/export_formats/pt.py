"""pt: a task's state dict as torch.save writes it. It is the one file with a pickle inside that forge writes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from forge_ship.export_formats.plan import Plan
from forge_ship.export_formats.safetensors import task_in

ABOUT = "weights alone as torch.save writes them; a pickle is inside"
PACKAGES = ("torch",)
FILE = "model.pt"
TOLERANCE = 0.0
WEIGHTS_ONLY = True


def write(plan: Plan, path: Path) -> None:
    torch.save({name: value.cpu() for name, value in task_in(plan.model).state_dict().items()}, path)


def read_file(path: Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True, map_location="cpu")
