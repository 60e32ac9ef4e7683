"""torchscript: a trace, for programs that still load TorchScript."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forge_ship.engine import ExportError
from forge_ship.export_formats.plan import Plan, quiet, users_line
from forge_ship.structure import flat, in_tuples

ABOUT = "TorchScript by tracing: for old C++ programs; torch has deprecated it"
PACKAGES = ("torch",)
STRUCTURED = True
FILE = "model.ts"
TOLERANCE = 1e-5


def write(plan: Plan, path: Path) -> None:
    try:
        with torch.no_grad(), quiet():
            torch.jit.save(_traced(plan), str(path))
    except Exception as error:
        line = users_line(error)
        raise ExportError(f"torch.jit.trace cannot record the model: {error}{f' ({line})' if line else ''}") from error


class _Arranged(nn.Module):
    def __init__(self, model: nn.Module, arrange: Callable[[Any], Any]):
        super().__init__()
        self.model, self._arrange = model, arrange

    def forward(self, *inputs: Tensor) -> Any:
        return self._arrange(self.model(*inputs))


def _traced(plan: Plan) -> Any:
    """Record the model; where TorchScript has no type for what it returns, with tuples for lists, or flat."""
    for model in (plan.model, _Arranged(plan.model, in_tuples)):
        try:
            return torch.jit.trace(model, plan.examples, strict=False, check_trace=False)
        except RuntimeError as error:
            if not re.search(r"output from traced|cannot infer type", str(error)):
                raise
    return torch.jit.trace(_Arranged(plan.model, flat), plan.examples, strict=False, check_trace=False)


def open_file(path: Path, names: list[str], device: str) -> Callable[[list[Tensor]], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.load(str(path), map_location=device)

    def run(inputs: list[Tensor]) -> Any:
        with torch.no_grad():
            return model(*inputs)

    return run
