"""Plan: what every format needs to write a model. Trace it with torch.export."""

from __future__ import annotations

import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from forge.util.frames import is_library
from forge_ship import torch_internals as internals
from forge_ship.engine import ExportError

__all__ = ["Plan", "traced"]

FIXED = r"marked (\w+) as dynamic but your code specialized it to be a constant \((\d+)\)"
"""How torch says that it fixes an axis."""
SUGGESTED = r"(\w+) = Dim\('\w+'((?:, (?:min|max)=\d+)+)\)"
"""How torch suggests the sizes of an axis."""
ATTEMPTS = 4
LARGEST = 2**31
"""Sizes that torch takes as "no limit"."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what torch logs and warns of while it traces, and fails to, from the user; errors carry the reason."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@dataclass
class Plan:
    """A model, example inputs, and the names of inputs, outputs and dynamic axes."""

    model: nn.Module
    "What is exported, in eval mode: `model(*examples)` takes and returns tensors. The task is `model.task`."
    inputs: dict[str, Tensor]
    "An example of each input by name, in the order of the model's arguments, on the export's device."
    axes: dict[str, dict[int, str]]
    'The names of dynamic axes by input and axis: `{"x": {0: "batch"}}`; an input without any is left out.'
    output_names: Sequence[str]
    "Of the flat outputs, in order."
    name: str = "model"
    "The class of the task."
    ranges: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    "The sizes of dynamic axes that torch suggested."
    largest: dict[str, int] = field(default_factory=dict)
    "The largest size of each dynamic axis in the data."
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)
    "The sizes that a dynamic axis may have, as torch.export found them."

    @property
    def examples(self) -> tuple[Tensor, ...]:
        """The example inputs as the model's arguments."""
        return tuple(self.inputs.values())

    @property
    def varies_length(self) -> bool:
        """Whether a recurrent model is to run at any length."""
        varied = any(symbol != "batch" for symbols in self.axes.values() for symbol in symbols.values())
        return varied and any(isinstance(module, nn.RNNBase) for module in self.model.modules())

    def dims(self) -> tuple[dict[int, Any] | None, ...]:
        """Return torch's names of the dynamic axes, input by input."""
        named = {symbol: self._dim(symbol) for found in self.axes.values() for symbol in found.values()}
        return tuple(
            {axis: named[symbol] for axis, symbol in self.axes.get(name, {}).items()} or None for name in self.inputs
        )

    def _dim(self, symbol: str) -> Any:
        least, most = self.ranges.get(symbol, (1, None))
        return Dim(symbol, min=least) if most is None else Dim(symbol, min=least, max=most)

    def shapes(self) -> dict[str, Any] | None:
        """Return the `dynamic_shapes` of a module that takes `*inputs`."""
        return {"inputs": self.dims()} if self.axes else None


def traced(plan: Plan) -> ExportedProgram:
    """Trace a model with torch.export. Limits that torch finds are taken; an axis that it fixes is refused."""
    for _ in range(ATTEMPTS):
        try:
            with torch.no_grad(), quiet(), looped() if plan.varies_length else nullcontext():
                program = torch.export.export(plan.model, plan.examples, dynamic_shapes=plan.shapes(), strict=False)
            break
        except Exception as error:
            _refuse_fixed(plan, error)
            if not _take_suggestions(plan, error):
                raise refusal(error, plan) from error
    else:
        raise ExportError(
            "torch.export suggests other sizes for the dynamic axes each time; name fewer: --dynamic batch."
        )
    plan.limits = _limits(plan, program)
    return program


@contextmanager
def looped() -> Iterator[None]:
    """Have torch trace LSTM and GRU as loops, which run at any length; else they are unrolled at the example's."""
    with internals.lstm_loops(), internals.gru_loops():
        yield


def _take_suggestions(plan: Plan, error: Exception) -> bool:
    """Take the sizes that torch suggests for dynamic axes, as in n = Dim('n', min=2, max=512); say if any is new."""
    before = dict(plan.ranges)
    for symbol, words in re.findall(SUGGESTED, str(error)):
        given = dict(re.findall(r"(min|max)=(\d+)", words))
        plan.ranges[symbol] = (int(given.get("min", 1)), int(given["max"]) if "max" in given else None)
    return plan.ranges != before


def _refuse_fixed(plan: Plan, error: Exception) -> None:
    """Refuse if torch fixes an axis that is to be dynamic."""
    for symbol, size in re.findall(FIXED, str(error)):
        raise ExportError(f"torch.export fixes the axis {symbol!r} at {size}. {_cure(plan, symbol)}") from error


def _cure(plan: Plan, symbol: str) -> str:
    line = "Look for a size in your forward that is taken as a number, as in x.view(64, -1) or len(x) (use x.shape[0])."
    return line if symbol == "batch" else f"{line} Or pad to one length, and give --dynamic batch."


def refusal(error: BaseException, plan: Plan) -> ExportError:
    """Explain why torch could not trace a model: its reason, the user's line and a cure."""
    text = str(error)
    cure = "Write it with tensor operations, or use --to torchscript, which records the branch that the example took."
    if re.search(r"data-dependent|GuardOnDataDependent|unbacked|Could not (guard|extract)", text, re.I):
        cure = (
            "forward decides by the values of a tensor. Use torch.cond or torch.where, or --to torchscript, which "
            "records the branch that the example took."
        )
    line = users_line(error)
    where = f"\n  {line}" if line else ""
    return ExportError(f"torch.export cannot trace the model: {_shortened(text)}{where}\n{cure}")


def users_line(error: BaseException) -> str:
    """Return the last line of the user's own code in an error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename) and not frame.filename.startswith("<")]
    if own:
        return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}"
    named = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', str(error))
    mine = [(file, line, name) for file, line, name in named if not is_library(file)]
    return f"{mine[-1][0]}:{mine[-1][1]}: in {mine[-1][2]}" if mine else ""


def _shortened(text: str, most: int = 3) -> str:
    """Return the first lines of torch's message that say something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:most])[:600]


def _limits(plan: Plan, program: ExportedProgram) -> dict[str, tuple[int, int]]:
    """Return the least and largest size of each dynamic axis that the program accepts."""
    limits: dict[str, tuple[int, int]] = {}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    by_name = {node.name: node for node in placeholders}
    for name, user in zip(plan.inputs, program.graph_signature.user_inputs, strict=False):
        value = by_name[user].meta.get("val") if isinstance(user, str) and user in by_name else None
        for axis, symbol in plan.axes.get(name, {}).items():
            size = getattr(value, "shape", {})[axis] if value is not None else None
            expression: Any = size.node.expr if isinstance(size, torch.SymInt) else None
            found = program.range_constraints.get(expression) if isinstance(size, torch.SymInt) else None
            if found is not None:
                limits[symbol] = (int(found.lower), int(found.upper) if found.upper < LARGEST else LARGEST)
    return limits
