"""torchscript: a trace, for programs that still load TorchScript."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from forge_ship.engine import ExportError
from forge_ship.export_formats.plan import Plan, quiet, users_line

ABOUT = "TorchScript by tracing: for old C++ programs; torch has deprecated it"
PACKAGES = ("torch",)
FILE = "model.ts"
TOLERANCE = 1e-5


def write(plan: Plan, path: Path) -> None:
    try:
        with torch.no_grad(), quiet():
            script = torch.jit.trace(plan.model, plan.examples, strict=False, check_trace=False)
            torch.jit.save(script, str(path))
    except Exception as error:
        line = users_line(error)
        raise ExportError(f"torch.jit.trace cannot record the model: {error}{f' ({line})' if line else ''}") from error


def open_file(path: Path, names: list[str], device: str) -> Callable[[list[Tensor]], list[Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.load(str(path), map_location=device)

    def run(inputs: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(model(*inputs))

    return run
