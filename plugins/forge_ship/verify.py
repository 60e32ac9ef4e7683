"""Verify an export: run the file in a fresh process on validation data, and compare it with the trained task."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forge.contract.task import TaskModule
from forge.runs.directions import mode_of
from forge.twin.compare import Distance, differences, first_difference, marks_of
from forge_ship.engine import Engine, ExportError, shape_text
from forge_ship.interface import Interface, computed_by, validate, with_batch
from forge_ship.structure import flat

SIZES = (1, 3)
"""Rows of the batches that are tried in addition to those of the data."""
HALF = 2e-2
"""The least tolerance of outputs in bfloat16 and float16."""
METRIC = 1e-3
"""By how much a metric of an export that is not quantised may differ, relative to the larger."""


class ExportMismatch(ExportError):
    """An export whose outputs or metric are not those of the trained task."""


@dataclass
class OutputDifference:
    """How far an output of the export is from that of the task, over all batches."""

    name: str
    tolerance: float
    largest: float = 0.0
    "The largest absolute difference; for integers the share of entries that differ."
    relative: float = 0.0
    "The largest difference relative to the largest entry of its batch."


@dataclass
class ExportVerdict:
    """What a verification found."""

    batches: int = 0
    sizes: list[int] = field(default_factory=list)
    outputs: list[OutputDifference] = field(default_factory=list)
    metrics_before: dict[str, float] = field(default_factory=dict)
    metrics_after: dict[str, float] = field(default_factory=dict)
    metric_note: str = ""
    "The reason where the metric of the export was not measured."
    structure_note: str = ""
    "What the program returns, where it is not the task's structure."
    weights: int = 0
    "Tensors of a file of weights alone, each of which is the task's."


def compare_outputs(
    engine: Engine,
    model: nn.Module,
    interface: Interface,
    axes: Mapping[str, Mapping[int, str]],
    tolerance: float,
    device: str,
    limits: Mapping[str, tuple[int, int]],
    is_recorded: bool = True,
) -> ExportVerdict:
    """Compare an export with `model` on the batches that the validation had and on batches of other sizes.

    Where `is_recorded`, the outputs for the former are those that the validation itself saw.
    """
    verdict, sizes = ExportVerdict(), set()
    known = {name: _allowed(name, output, tolerance) for name, output in interface.calls[0].outputs.items()}
    for inputs, outputs in _cases(interface, axes, limits):
        expected = outputs if outputs and is_recorded else dict(zip(known, run(model, inputs, device), strict=True))
        for found in differences(marks_of(_found(engine, inputs)), marks_of(expected)):
            _widen(known[found.path], found.distance)
        verdict.batches += 1
        rows = next(iter(inputs.values()))
        sizes.add(rows.shape[0] if rows.dim() else 1)
    verdict.sizes, verdict.outputs = sorted(sizes), list(known.values())
    return verdict


def _allowed(name: str, output: Tensor, tolerance: float) -> OutputDifference:
    is_half = output.dtype in (torch.bfloat16, torch.float16)
    return OutputDifference(name, max(tolerance, HALF) if is_half else tolerance)


def _widen(seen: OutputDifference, distance: Distance) -> None:
    """Note how far an output is; refuse it if that is too far."""
    absolute = distance.relative if distance.absolute is None else distance.absolute
    seen.largest, seen.relative = max(seen.largest, absolute), max(seen.relative, distance.relative)
    if not distance.relative <= seen.tolerance:
        of_it = f", {distance.relative:.3g} of the largest; {seen.tolerance:g} is allowed"
        raise ExportMismatch(
            f"The output {seen.name!r} of the export differs from the task's: {distance.text}"
            f"{of_it if math.isfinite(distance.relative) else ''}."
        )


def _found(engine: Engine, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    try:
        return engine(inputs)
    except ExportError as error:
        shapes = ", ".join(f"{name} of {shape_text(tensor.shape)}" for name, tensor in inputs.items())
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if len(lines) < 2 else f"{lines[0]} ... {lines[-1]}"
        raise ExportMismatch(f"The export fails on {shapes}, which the task takes: {reason}") from error


def _cases(
    interface: Interface, axes: Mapping[str, Mapping[int, str]], limits: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor] | None]]:
    """Yield inputs and the task's own outputs for them, None where they are still to be computed."""
    for call in interface.calls:
        yield call.inputs, call.outputs
    has_batch = any("batch" in symbols.values() for symbols in axes.values())
    least, most = limits.get("batch", (1, 2**31))
    for rows in SIZES if has_batch else ():
        if least <= rows <= most:
            yield with_batch(interface.calls[0], axes, rows), None


def run(model: Callable[..., Any], inputs: Mapping[str, Tensor], device: str) -> Sequence[Tensor]:
    """Compute a module's outputs."""
    with torch.no_grad():
        return flat(model(*(tensor.to(device) for tensor in inputs.values())))


def compare_structure(returned: Any, expected: Any, outputs: Sequence[str]) -> str:
    """Refuse a program that returns another structure than the task; return a note where its format holds none such."""
    if returned == expected:
        return ""
    if expected == "tensor" or returned != ["tensor"] * len(outputs):
        raise ExportMismatch(f"The export returns {json.dumps(returned)}; the task returns {json.dumps(expected)}.")
    return f"the format cannot hold what the task returns: its program returns a tuple of {', '.join(outputs)}"


def compare_weights(found: Mapping[str, Tensor], task: TaskModule, tolerance: float) -> ExportVerdict:
    """Compare the tensors of a file with the task's, by a tolerance of 0 bit for bit; of those that share memory one is
    enough."""
    own = {name: value for name, value in task.state_dict().items() if isinstance(value, Tensor)}
    there = {own[name].data_ptr() for name in own.keys() & found.keys()}
    expected = {name: value for name, value in own.items() if name in found or value.data_ptr() not in there}
    # a library may read another type than was written
    read = {name: value.to(own[name].dtype) if name in own else value for name, value in found.items()}
    apart = first_difference(read, expected, tolerance)
    if apart is not None:
        raise ExportMismatch(f"The weights of the export differ from the task's {apart}.")
    return ExportVerdict(weights=len(found))


# -- the metric -------------------------------------------------------------------------------------------------------


def compare_metrics(
    verdict: ExportVerdict,
    task: TaskModule,
    interface: Interface,
    engine: Engine,
    loader: Any,
    device: str,
    batches: int | None,
) -> None:
    """Validate once more with the export in the place of the task's method."""
    verdict.metrics_before = interface.metrics
    if not interface.counted:
        verdict.metric_note = (
            f"validation_step of {type(task).__name__} does not call {interface.method}, so its metrics say nothing "
            "about the export; the outputs were compared"
        )
        return
    with computed_by(task, interface, engine) as counted:
        verdict.metrics_after = validate(task, loader, device, batches)
    if not counted[0]:
        raise ExportMismatch("The validation of the export never called it.")


def refuse_other_metrics(verdict: ExportVerdict) -> None:
    """Refuse an export whose metrics are not the task's; one that is not quantised has the same up to rounding."""
    for name, before in verdict.metrics_before.items():
        after = verdict.metrics_after.get(name)
        if after is not None and not math.isclose(before, after, rel_tol=METRIC, abs_tol=METRIC * 1e-2):
            raise ExportMismatch(f"{name} is {before:.6g} with the trained task and {after:.6g} with the export.")


def refuse_drop(verdict: ExportVerdict, most: float) -> None:
    """Refuse an export that loses more than `most` of a metric whose better direction is known."""
    judged = {name: mode for name in verdict.metrics_after if (mode := mode_of(name)) is not None}
    if not judged:
        raise ExportError(
            f"--max-drop {most:g} cannot be judged: {verdict.metric_note or 'no metric has a known direction'}."
        )
    accuracies = {name: mode for name, mode in judged.items() if mode == "max"} or judged
    for name, mode in accuracies.items():
        before, after = verdict.metrics_before[name], verdict.metrics_after[name]
        drop = before - after if mode == "max" else after - before
        if not drop <= most:
            raise ExportMismatch(
                f"{name} goes from {before:.6g} to {after:.6g}: a loss of {drop:.3g}, and --max-drop is {most:g}."
            )
