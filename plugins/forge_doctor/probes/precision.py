"""Probes of how a model is run: on the device against the CPU, in bf16 against float32, compiled against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from forge.contract.task import TaskModule
from forge.data.accumulation_windows import batch_size
from forge.rng import reseed
from forge.torch_internals import pytree
from forge_doctor.findings import Finding
from forge_doctor.patient import NotApplicable, Patient, tensors
from forge_doctor.watch import OuterCall

ALLOWED = {"device": 1e-2, "compile": 1e-2, "amp": 0.3}
"""Differences of a module's outputs that rounding explains, as a share of their deviation."""

Outputs = dict[str, Tensor]


def devices(patient: Patient) -> Iterator[Finding]:
    """The same modules on the CPU, where the run is on an accelerator."""
    if patient.device.type == "cpu":
        raise NotApplicable
    yield from _compared(patient, "device", f"on {patient.device.type} and on the CPU", _on_cpu)


def mixed_precision(patient: Patient) -> Iterator[Finding]:
    """The same modules under autocast, where the run has mixed precision."""
    amp = next((plugin for plugin in patient.plugins if plugin.name == "amp"), None)
    if amp is None:
        raise NotApplicable
    dtype = torch.float16 if amp.config.dtype == "fp16" else torch.bfloat16

    def rounded(module: nn.Module, call: OuterCall) -> Outputs:
        with torch.autocast(patient.device.type, dtype):
            return _outputs(module, call.args, call.kwargs)

    yield from _compared(patient, "amp", f"in {str(dtype).removeprefix('torch.')} and in float32", rounded)


def compiled(patient: Patient) -> Iterator[Finding]:
    """The same modules compiled, where the run compiles them."""
    if not any(plugin.name == "compile" for plugin in patient.plugins):
        raise NotApplicable

    def fast(module: nn.Module, call: OuterCall) -> Outputs:
        return {"": _first(torch.compile(module)(*call.args, **call.kwargs))}

    yield from _compared(patient, "compile", "compiled and eager", fast)


def _compared(
    patient: Patient, way: str, words: str, other: Callable[[nn.Module, OuterCall], Outputs]
) -> Iterator[Finding]:
    """Compare every module's outputs, run in two ways, and name the first that differs."""
    task = patient.clone().eval()
    batch = patient.val_batches[0] if patient.can_validate else patient.batches[0]
    for call in networks(patient, task, batch):
        module = task.get_submodule(call.path)
        with torch.no_grad():
            plain, changed = _outputs(module, call.args, call.kwargs), other(module, call)
        for path, x in plain.items():
            y = changed.get(path)
            if y is None or x.shape != y.shape or not x.is_floating_point() or x.numel() < 2:
                continue
            difference = _difference(x, y)
            if not difference <= ALLOWED[way]:
                name = ".".join(part for part in (call.path, path) if part) or type(task).__name__
                text = (
                    f"{words[0].upper()}{words[1:]} {name} gives outputs that differ by {difference:.2g} of their "
                    f"deviation; the modules before it agree."
                )
                yield Finding("results_differ", text, name, {"difference": difference, "allowed": ALLOWED[way]})
                return


def _on_cpu(module: nn.Module, call: OuterCall) -> Outputs:
    args, kwargs = pytree.tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, (call.args, call.kwargs))
    return _outputs(copy.deepcopy(module).cpu(), args, kwargs)


def _outputs(module: nn.Module, args: Any, kwargs: Any) -> Outputs:
    """The first output of every module inside, by path, in the order in which they end."""
    found: Outputs = {}

    def hook(path: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            if path not in found and tensors(output):
                found[path] = tensors(output)[0].detach().float().cpu()

        return note

    handles = [inner.register_forward_hook(hook(path)) for path, inner in module.named_modules()]
    try:
        reseed(0)
        module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _first(output: Any) -> Tensor:
    return tensors(output)[0].detach().float().cpu()


def _difference(x: Tensor, y: Tensor) -> float:
    scale = float(x.std(correction=0)) or float(x.abs().max()) or 1.0
    return float((x - y).abs().max()) / scale


def networks(patient: Patient, task: TaskModule, batch: Any) -> list[OuterCall]:
    """The outermost modules that a step calls with the batch's rows, and that return a row for each."""
    size = batch_size(batch)
    stage = "val" if patient.can_validate else "train"
    return [
        call
        for call in patient.outer_calls(task, batch, stage)
        if any(x.ndim and len(x) == size for x in tensors((call.args, call.kwargs)))
        and any(x.ndim and len(x) == size and x.is_floating_point() for x in tensors(_plain(call.output)))
        and not _is_loss(task.get_submodule(call.path))
    ]


def _is_loss(module: nn.Module) -> bool:
    """Whether a module is one of torch's losses, or derives from one."""
    return any(kind.__module__ == nn.MSELoss.__module__ for kind in type(module).__mro__)


def _plain(output: Any) -> Any:
    """The tensors of an output of any class."""
    return dict(output) if hasattr(output, "items") else output
