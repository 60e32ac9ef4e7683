"""Probes of gradients on their way to the weights: hooks, repeated modules, groups of weight decay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, named, parameters

SMALL = 0.01
"""What a hook leaves of a gradient, as a share, that is next to nothing."""


def hooks(patient: Patient) -> Iterator[Finding]:
    """What hooks on parameters leave of their gradients."""
    if not patient.hooks:
        return
    task = patient.clone()
    for batch in patient.batches:
        patient.loss(task, batch, name=None).backward()
    shrunk: dict[str, float] = {}
    for name, p in parameters(task).items():
        if name not in patient.hooks or p.grad is None or not float(p.grad.norm()):
            continue
        after = _through(patient.hooks[name], p.grad)
        shrunk[name] = float(after.norm()) / float(p.grad.norm())
    little = [name for name, ratio in shrunk.items() if ratio < SMALL]
    meant = all(shrunk[name] == 0 for name in little) and len(little) < len(parameters(task))
    if little and not meant:
        worst = max(shrunk[name] for name in little)
        text = f"Hooks leave {worst:.2g} of the gradients, or less, of {len(little)} parameters: {named(little)}."
        yield Finding("gradient_hook", text, little[0], {"left": worst, "parameters": little[:8]})


def _through(found: list[Any], gradient: Tensor) -> Tensor:
    for hook in found:
        changed = hook(gradient.clone())
        gradient = changed if isinstance(changed, Tensor) else gradient
    return gradient


def repeated(patient: Patient) -> Iterator[Finding]:
    """Lists of modules that hold one module several times."""
    for path, module in patient.task.named_modules():
        if type(module) not in (nn.ModuleList, nn.Sequential):
            continue
        inner = [child for child in module._modules.values() if child is not None]
        counts = Counter(id(child) for child in inner if any(p.requires_grad for p in child.parameters()))
        if counts and max(counts.values()) > 1:
            times = max(counts.values())
            text = f"{path} holds one module {times} times: its {len(inner)} layers share one set of weights."
            yield Finding("repeated_module", text, path, {"times": times})
            return
