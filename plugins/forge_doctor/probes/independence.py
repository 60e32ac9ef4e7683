"""Probes of independence: of samples from each other, of a position from what follows, of outputs from padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from forge.contract.task import TaskModule
from forge.data.accumulation_windows import batch_size
from forge.rng import reseed
from forge.torch_internals import pytree
from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient, loss_of, tensors
from forge_doctor.probes.graph import modes_noted, on_in_validation
from forge_doctor.watch import OuterCall

NEAR = 1e-4
"""Differences of outputs that count as none, as a share of their deviation."""


def _batch(patient: Patient) -> Any:
    return patient.val_batches[0] if patient.can_validate else patient.batches[0]


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


def again(task: nn.Module, call: OuterCall, args: Any, kwargs: Any, seed: int = SEED) -> list[Tensor]:
    reseed(seed)
    with torch.no_grad():
        return tensors(_plain(task.get_submodule(call.path)(*args, **kwargs)))


def draws(task: nn.Module, call: OuterCall, before: list[Tensor]) -> bool:
    """Whether a module gives another output with other random numbers, and the same one with the same."""
    same, other = (again(task, call, call.args, call.kwargs, seed) for seed in (SEED, SEED + 1))
    return _are_equal(before, same) and not _are_equal(before, other)


def _are_equal(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(before, after, strict=True))


def random_modules(patient: Patient) -> Iterator[Finding]:
    """Dropout that is on in evaluation mode."""
    task = patient.clone().eval()
    for call in networks(patient, task, _batch(patient)):
        with DropoutWatch() as watch:
            before = again(task, call, call.args, call.kwargs)
        if watch.line and draws(task, call, before):
            yield Finding(
                "random_evaluation",
                f"{call.path or type(task).__name__} gives other outputs each time in evaluation mode: dropout is on "
                f"there, at {watch.line}.",
                watch.line,
            )
            return


def _paired(before: list[Tensor], after: list[Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    return [
        (x, y)
        for x, y in zip(before, after, strict=True)
        if x.shape == y.shape
        and x.ndim
        and len(x) == size
        and x.is_floating_point()
        and not (x.ndim > 1 and x.shape[1] == size)  # of each with each, as for contrastive losses
    ]


def difference(x: Tensor, y: Tensor) -> float:
    """The largest difference, in deviations."""
    if not x.numel():
        return 0.0
    scale = float(x.float().std(correction=0)) or float(x.float().abs().max()) or 1.0
    return float((x.float() - y.float()).abs().max()) / scale


"""Positions of padding that are appended."""


def repeated_evaluation(patient: Patient) -> Iterator[Finding]:
    """Validate one batch twice in evaluation mode, with other random numbers."""
    if not patient.can_validate:
        return
    task = patient.clone().eval()
    results = []
    for number in (1, 2):
        reseed(number)
        with torch.no_grad(), DropoutWatch() as watch, modes_noted(task, at_any_call=True) as off:
            results.append(task.validation_step(patient.val_batches[0]))
        if any(on_in_validation(task, off)):  # which is a finding of its own
            return
    first, second = (_numbers(result) for result in results)
    differing = [name for name in first if name in second and not _close(first[name], second[name])]
    if differing:
        by = f": dropout is on in evaluation, at {watch.line}" if watch.line else ""
        yield Finding(
            "random_evaluation",
            f"Validating one batch twice gives {first[differing[0]]:.6g} and {second[differing[0]]:.6g} for "
            f"{differing[0]}{by}.",
            watch.line or f"{type(task).__name__}.validation_step",
            {"metric": differing[0], "first": first[differing[0]], "second": second[differing[0]]},
            level="warning" if watch.line else "note",
        )


class DropoutWatch(torch.overrides.TorchFunctionMode):
    """Remembers the line of the first dropout that is on."""

    line = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from forge_doctor.watch import where

        name, given = getattr(func, "__name__", ""), {**(kwargs or {})}
        if "dropout" in name and not self.line:
            rate = given.get("p", args[1] if len(args) > 1 else 0.5)
            on = given.get("training", args[2] if len(args) > 2 else True)
            if on and rate:
                self.line = where()
        return func(*args, **given)


def _numbers(result: Any) -> dict[str, float]:
    items = result.items() if isinstance(result, dict) else {"loss": result}.items()
    return {name: float(value) for name, value in items if isinstance(value, (Tensor, float)) and _is_scalar(value)}


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() == 1


def _close(x: float, y: float) -> bool:
    return x == y or abs(x - y) <= 1e-6 * max(abs(x), abs(y)) or (x != x and y != y)


def reads_its_input(patient: Patient) -> Iterator[Finding]:
    """Before and after a few updates, exchange the inputs of a batch: the loss must change."""
    batch = patient.batches[0]
    size = batch_size(batch)
    floats = patient.inputs(batch)
    if size is None or size < 4 or not floats:
        return
    task = patient.clone()
    exchanged = pytree.tree_map(lambda x: x[:1].expand_as(x) if any(x is y for y in floats) else x, batch)
    with torch.no_grad():
        losses = [float(loss_of(patient.run(task, given)).detach()) for given in (batch, exchanged)]
    was_ignored, patient.ignores = patient.ignores, losses[0] == losses[1]
    if was_ignored and patient.ignores:
        yield Finding(
            "input_ignored",
            f"The loss of a batch stays {losses[0]:.6g} when all samples get the input of the first: the model does "
            "not read it.",
            type(task).__name__,
            {"loss": losses[0]},
        )
