"""executorch: a program for phones and small devices, on XNNPACK."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_ship.engine import ExportError
from forge_ship.export_formats.plan import Plan, quiet, traced

ABOUT = "ExecuTorch: phones and small devices"
PACKAGES = ("executorch",)
EXTRA = "forge-trainer[executorch]"
FILE = "model.pte"
TOLERANCE = 1e-4


def write(plan: Plan, path: Path) -> None:
    for symbol, most in plan.largest.items():  # memory is planned ahead: without a limit, for the example's sizes
        plan.ranges.setdefault(symbol, (1, most))
    program = traced(plan)
    try:
        with quiet(), torch.no_grad():  # a batch norm is folded, and examples come from an inference
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import to_edge_transform_and_lower

            lowered: Any = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
            path.write_bytes(lowered.to_executorch().buffer)
    except Exception as error:
        raise ExportError(f"ExecuTorch cannot lower the model: {str(error).strip()[:600]}") from error


def open_file(path: Path, names: list[str], device: str) -> Callable[[list[Tensor]], list[Tensor]]:
    from executorch.runtime import Runtime

    method: Any = Runtime.get().load_program(path).load_method("forward")

    def run(inputs: list[Tensor]) -> list[Tensor]:
        return [output.clone() if isinstance(output, torch.Tensor) else output for output in method.execute(inputs)]

    return run
