"""aoti: native code by AOTInductor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_ship import torch_internals as internals
from forge_ship.engine import ExportError
from forge_ship.export_formats.plan import Plan, quiet, traced

ABOUT = "AOTInductor: compiled native code for this kind of machine, for Python and C++"
PACKAGES = ("torch",)
STRUCTURED = True
FILE = "model.aoti.pt2"
TOLERANCE = 1e-4


def write(plan: Plan, path: Path) -> None:
    program = traced(plan)
    try:
        with torch.no_grad(), quiet():
            internals.aoti_compile_and_package(program, package_path=str(path))
    except Exception as error:
        if "Compiler" in type(error).__name__ or "compiler" in str(error)[:200]:
            raise ExportError(
                "AOTInductor needs a C++ compiler to write an export (not to run one): install g++ (apt install g++)."
            ) from error
        raise ExportError(f"AOTInductor cannot compile the model: {str(error).strip()[:600]}") from error


def open_file(path: Path, names: list[str], device: str) -> Callable[[list[Tensor]], Any]:
    model = internals.aoti_load_package(str(path))

    def run(inputs: list[Tensor]) -> Any:
        with torch.no_grad():
            return model(*inputs)

    return run
