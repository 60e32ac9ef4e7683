"""Probes of how a model is run: on the device against the CPU, in bf16 against float32, compiled against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from forge.env import move
from forge_doctor.experiments.intervene import calls_of, numbers
from forge_doctor.findings import Finding
from forge_doctor.patient import NotApplicable, Patient

ALLOWED = {"device": 1e-2, "compile": 1e-2, "amp": 0.3}
"""Differences of a module's outputs that rounding explains, as a share of their deviation."""


def devices(patient: Patient) -> Iterator[Finding]:
    """The same step on the CPU, where the run is on an accelerator."""
    if patient.device.type == "cpu":
        raise NotApplicable
    other, batch = copy.copy(patient), move(_given(patient), torch.device("cpu"))
    other.task = patient.clone().cpu()
    yield from _compared(patient, "device", f"on {patient.device.type} and on the CPU", lambda: _outputs(other, batch))


def mixed_precision(patient: Patient) -> Iterator[Finding]:
    """The same step under autocast, where the run has mixed precision."""
    amp = next((plugin for plugin in patient.plugins if plugin.name == "amp"), None)
    if amp is None:
        raise NotApplicable
    dtype = torch.float16 if amp.config.dtype == "fp16" else torch.bfloat16

    def rounded() -> Outputs:
        with torch.autocast(patient.device.type, dtype):
            return _outputs(patient, _given(patient))

    yield from _compared(patient, "amp", f"in {str(dtype).removeprefix('torch.')} and in float32", rounded)


def compiled(patient: Patient) -> Iterator[Finding]:
    """The same step with compiled modules, where the run compiles them: what it returns."""
    if not any(plugin.name == "compile" for plugin in patient.plugins):
        raise NotApplicable

    def fast() -> Outputs:
        task = patient.clone().eval()
        for module in task.children():
            module.compile()
        with torch.no_grad():
            return {
                name: torch.tensor([x])
                for name, x in numbers(patient.run(task, _given(patient), _stage(patient))).items()
            }

    yield from _compared(patient, "compile", "compiled and eager", fast)


Outputs = dict[str, Tensor]
"""What modules and the step gave, in the order in which they ended."""


def _stage(patient: Patient) -> str:
    return "val" if patient.can_validate else "train"


def _given(patient: Patient) -> Any:
    return patient.val_batches[0] if patient.can_validate else patient.batches[0]


def _outputs(patient: Patient, batch: Any) -> Outputs:
    calls, said = calls_of(patient, batch, _stage(patient), every=True)
    found = {
        path or type(patient.task).__name__: out[0].float().cpu()
        for (path, number), out in calls.items()
        if out and not number
    }
    return found | {name: torch.tensor([value]) for name, value in said.items()}


def _compared(patient: Patient, way: str, words: str, other: Callable[[], Outputs]) -> Iterator[Finding]:
    """Run a step in two ways, and name the first module that differs."""
    changed = other()
    for name, x in _outputs(patient, _given(patient)).items():
        y = changed.get(name)
        if y is None or x.shape != y.shape or not x.numel():
            continue
        scale = float(x.std(correction=0)) or float(x.abs().max()) or 1.0
        difference = float((x - y).abs().max()) / scale
        if not difference <= ALLOWED[way]:
            text = (
                f"{words[0].upper()}{words[1:]} {name} differs by {difference:.2g} of its deviation; what comes before "
                "it agrees."
            )
            yield Finding("results_differ", text, name, {"difference": difference, "allowed": ALLOWED[way]})
            return
