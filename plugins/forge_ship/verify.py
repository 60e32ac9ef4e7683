"""Verify an export: run the file in a fresh process on validation data, and compare it with the trained task."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forge.contract.task import TaskModule
from forge.runs.directions import mode_of
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
    dtype: str
    largest: float = 0.0
    "The largest absolute difference; for integers the share of entries that differ."
    relative: float = 0.0
    "The largest difference relative to the largest entry of its batch."
    tolerance: float = 0.0
    scale: float = 0.0
    "The largest entry of the task's output."


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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_outputs(
    engine: Engine,
    model: nn.Module,
    interface: Interface,
    axes: Mapping[str, Mapping[int, str]],
    tolerance: float,
    device: str,
    limits: Mapping[str, tuple[int, int]],
    recorded: bool = True,
) -> ExportVerdict:
    """Compare an export with `model` on the batches that the validation had and on batches of other sizes.

    Where `recorded`, the outputs for the former are those that the validation itself saw.
    """
    verdict = ExportVerdict()
    differences: dict[str, OutputDifference] = {}
    for inputs, outputs in _cases(interface, axes, limits):
        expected = (
            outputs
            if outputs and recorded
            else dict(zip(interface.output_names, run(model, inputs, device), strict=True))
        )
        found = _found(engine, inputs)
        _compare(expected, found, tolerance, differences)
        verdict.batches += 1
        rows = next(iter(inputs.values()))
        verdict.sizes.append(rows.shape[0] if rows.dim() else 1)
    verdict.sizes = sorted(set(verdict.sizes))
    verdict.outputs = list(differences.values())
    return verdict


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


def _compare(
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    tolerance: float,
    differences: dict[str, OutputDifference],
) -> None:
    for name, wanted in expected.items():
        got, wanted = found[name].detach().cpu(), wanted.detach().cpu()
        if got.shape != wanted.shape:
            raise ExportMismatch(
                f"The output {name!r} of the export has the shape {shape_text(got.shape)}; the task's has "
                f"{shape_text(wanted.shape)}."
            )
        if got.dtype != wanted.dtype:
            raise ExportMismatch(f"The output {name!r} of the export is {got.dtype}; the task's is {wanted.dtype}.")
        seen = differences.setdefault(name, OutputDifference(name, str(wanted.dtype).removeprefix("torch.")))
        seen.tolerance = max(tolerance, HALF) if wanted.dtype in (torch.bfloat16, torch.float16) else tolerance
        _widen(seen, wanted, got)
        if not seen.relative <= seen.tolerance:
            raise ExportMismatch(
                f"The output {name!r} of the export differs from the task's: by {seen.largest:.3g} at most, "
                f"{seen.relative:.3g} relative to its largest entry; {seen.tolerance:g} is allowed."
            )


def _widen(seen: OutputDifference, wanted: Tensor, got: Tensor) -> None:
    if not wanted.is_floating_point() and not wanted.is_complex():
        share = (wanted != got).double().mean().item() if wanted.numel() else 0.0
        seen.largest, seen.relative = max(seen.largest, share), max(seen.relative, share)
        seen.scale = max(
            seen.scale, float(wanted.abs().max()) if wanted.numel() and wanted.dtype != torch.bool else 1.0
        )
        return
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    a, b = wanted.to(wide), got.to(wide)
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        seen.largest = seen.relative = math.inf
        return
    largest = (a[finite] - b[finite]).abs().max().item() if finite.any() else 0.0
    scale = a[finite].abs().max().item() if finite.any() else 1.0
    seen.largest, seen.scale = max(seen.largest, largest), max(seen.scale, scale)
    seen.relative = max(seen.relative, largest / scale if scale else (0.0 if largest == 0 else math.inf))


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


def with_weights(task: TaskModule, tensors: Mapping[str, Tensor]) -> TaskModule:
    """Return a copy of a task whose weights come from a file alone."""
    fresh = copy.deepcopy(task)
    with torch.no_grad():
        for value in fresh.state_dict().values():  # not buffers that are never saved
            if isinstance(value, Tensor):
                value.zero_()
    missing, unexpected = fresh.load_state_dict(dict(tensors), strict=False)
    tied = {name for name, value in task.state_dict().items() if isinstance(value, Tensor)} - set(missing)
    kept = {task.state_dict()[name].data_ptr() for name in tied}
    lost = [n for n in missing if not n.endswith("_extra_state") and task.state_dict()[n].data_ptr() not in kept]
    if lost or unexpected:
        raise ExportMismatch(
            f"The file lacks {', '.join(lost) or 'nothing'} and has {', '.join(unexpected) or 'nothing'} besides."
        )
    return fresh.eval()
