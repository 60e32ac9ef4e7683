"""safetensors: a task's weights alone."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from forge.checkpoint.weights import save_weights
from forge_ship.export_formats.plan import Plan

ABOUT = "weights alone, without code"
PACKAGES = ("safetensors",)
FILE = "model.safetensors"
TOLERANCE = 0.0
WEIGHTS_ONLY = True


def write(plan: Plan, path: Path) -> None:
    save_weights(task_in(plan.model), path)


def task_in(model: nn.Module) -> nn.Module:
    return model.get_submodule("task")


def read_file(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)
