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
from forge_doctor.patient import SEED, Patient, loss_of, tensors, with_rows
from forge_doctor.probes.graph import modes_noted, on_in_validation
from forge_doctor.probes.losses import padding_value
from forge_doctor.watch import OuterCall

NEAR = 1e-4
"""Differences of outputs that count as none, as a share of their deviation."""


def samples(patient: Patient) -> Iterator[Finding]:
    """Change one half of a batch: the outputs of the other half must stay."""
    batch = _batch(patient)
    size = batch_size(batch)
    if size is None or size < 4 or not _all_rows(batch, size):
        return
    task = patient.clone().eval()
    half = size // 2
    for call in networks(patient, task, batch):
        before = again(task, call, call.args, call.kwargs)
        if draws(task, call, before):
            continue
        turned = again(task, call, *with_rows((call.args, call.kwargs), size, lambda x: x.flip(0)))
        worst = max((difference(x, y.flip(0)) for x, y in _paired(before, turned, size)), default=0.0)
        if worst > NEAR:
            yield Finding(
                "batch_dependence",
                f"The outputs of {call.path or type(task).__name__} change by {worst:.2g} of their deviation when the "
                "order of the samples in a batch is reversed, in evaluation mode.",
                call.path or type(task).__name__,
                {"difference": worst},
            )
            return
        for kept, change in ((slice(half), _last_alike), (slice(half, size), _first_alike)):
            after = again(task, call, *with_rows((call.args, call.kwargs), size, change))
            worst = max((difference(x[kept], y[kept]) for x, y in _paired(before, after, size)), default=0.0)
            if worst > NEAR:
                yield Finding(
                    "batch_dependence",
                    f"The outputs of {call.path or type(task).__name__} for one half of a batch change by {worst:.2g} "
                    "of their deviation when the inputs of the other half do, in evaluation mode.",
                    call.path or type(task).__name__,
                    {"difference": worst},
                )
                return


def _last_alike(x: Tensor) -> Tensor:
    """The second half of a batch becomes copies of its last row."""
    half = len(x) // 2
    return torch.cat([x[:half], x[-1:].expand_as(x[half:])])


def _first_alike(x: Tensor) -> Tensor:
    half = len(x) // 2
    return torch.cat([x[:1].expand_as(x[:half]), x[half:]])


def _batch(patient: Patient) -> Any:
    return patient.val_batches[0] if patient.can_validate else patient.batches[0]


def _all_rows(batch: Any, size: int) -> bool:
    """Whether each tensor of a batch has a sample in each row; an edge list of a graph has not."""
    return all(x.ndim and len(x) == size for x in tensors(batch))


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


def ignored(patient: Patient) -> Iterator[Finding]:
    """After a few updates, give all samples the input of the first: the outputs of a network must change."""
    batch = patient.batches[0]
    size = batch_size(batch)
    if size is None or size < 4:
        return
    task = patient.clone().eval()
    for call in networks(patient, task, batch):
        floats = [x for x in tensors((call.args, call.kwargs)) if x.is_floating_point() and x.ndim > 1]
        if not floats or all(x.ndim and len(x) == size and bool((x == x[:1]).all()) for x in floats):
            continue
        before = again(task, call, call.args, call.kwargs)
        after = again(task, call, *with_rows((call.args, call.kwargs), size, lambda x: x[:1].expand_as(x).clone()))
        pairs = _paired(before, after, size)
        if pairs and all(difference(x, y) < 1e-7 for x, y in pairs) and not draws(task, call, before):
            yield Finding(
                "input_ignored",
                f"The outputs of {call.path or type(task).__name__} stay when all samples get the input of the first: "
                "the model does not read it.",
                call.path or type(task).__name__,
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


def future(patient: Patient) -> Iterator[Finding]:
    """Where labels are the inputs moved by one position, an output must not change with what follows it."""
    batch = patient.batches[0]
    size = batch_size(batch)
    inputs = shifted(batch, [call.target for call in patient.watched.losses if isinstance(call.target, Tensor)])
    if inputs is None or size is None:
        return
    task = patient.clone().eval()
    length = inputs.shape[1]
    cut = length // 2
    for call in patient.outer_calls(task, batch):
        given = [x for x in tensors((call.args, call.kwargs)) if _begins_as(x, inputs)]
        if not given:
            continue
        changed = pytree.tree_map(
            lambda x, given=given: _other_end(x, cut) if any(x is y for y in given) else x,
            (call.args, call.kwargs),
        )
        before, after = again(task, call, call.args, call.kwargs), again(task, call, *changed)
        for x, y in zip(before, after, strict=True):
            if x.shape == y.shape and x.ndim == 3 and x.shape[1] >= cut and x.is_floating_point():
                worst = difference(x[:, :cut], y[:, :cut])
                if worst > NEAR:
                    yield Finding(
                        "sees_the_future",
                        f"The labels are the inputs moved by one position, but outputs before position {cut} change "
                        f"(by {worst:.2g} of their deviation) when later inputs do: the model sees what it predicts.",
                        call.path or type(task).__name__,
                        {"difference": worst},
                    )
                    return


def shifted(batch: Any, targets: list[Tensor]) -> Tensor | None:
    """The ids of a batch that another tensor of it, or the target of a loss, holds moved by one position."""
    ids = [x for x in tensors(batch) if not x.is_floating_point() and x.ndim == 2 and x.shape[1] > 3]
    for x in ids:
        for y in ids:
            if x is not y and x.shape == y.shape and float((x[:, 1:] == y[:, :-1]).float().mean()) > 0.95:
                return x
        for y in targets:
            if y.numel() == x[:, 1:].numel() and bool((y.flatten() == x[:, 1:].flatten()).all()):
                return x[:, :-1]
    return None


def _begins_as(x: Tensor, inputs: Tensor) -> bool:
    width = min(x.shape[1], inputs.shape[1]) if x.ndim == 2 else 0
    same = x.ndim == 2 and len(x) == len(inputs) and width > 2 and not x.is_floating_point()
    return same and bool((x[:, :width] == inputs[:, :width]).all())


def _other_end(x: Tensor, cut: int) -> Tensor:
    return torch.cat([x[:, :cut], x[:, cut:].roll(1, 0)], 1)


def padded(patient: Patient) -> Iterator[Finding]:
    """Append padding to rows of ids: outputs must stay."""
    batch = _batch(patient)
    size = batch_size(batch)
    if size is None:
        return
    task = patient.clone().eval()
    for call in networks(patient, task, batch):
        for ids in tensors((call.args, call.kwargs)):
            if ids.is_floating_point() or ids.ndim != 2 or len(ids) != size or ids.shape[1] < 4:
                continue
            value = padding_value(ids)
            if value is None or ids.dtype == torch.bool:
                continue
            longer = pytree.tree_map(
                lambda x, ids=ids, value=value: _longer(x, ids, value) if isinstance(x, Tensor) else x,
                (call.args, call.kwargs),
            )
            try:
                before, after = again(task, call, call.args, call.kwargs), again(task, call, *longer)
            except Exception:  # the length is fixed
                continue
            for x, y in zip(before, after, strict=True):
                if x.is_floating_point() and x.ndim == y.ndim and len(x) == size and x.ndim > 1:
                    y = y[:, : x.shape[1]]
                    if x.shape != y.shape:
                        continue
                    if x.shape[1] == ids.shape[1] and x.ndim > 2:
                        keep = ids != value
                        x, y = x[keep], y[keep]
                    worst = difference(x, y)
                    if worst > 0.02:
                        yield Finding(
                            "padding_dependence",
                            f"The outputs of {call.path or type(task).__name__} change by {worst:.2g} of their "
                            f"deviation when {EXTRA} more positions of padding ({value}) are appended: a sample's "
                            "result depends on the longest one beside it.",
                            call.path or type(task).__name__,
                            {"difference": worst, "padding": value},
                        )
                        return


EXTRA = 6
"""Positions of padding that are appended."""


def _longer(x: Tensor, ids: Tensor, value: int) -> Tensor:
    """Append padding to the ids, and zeros to masks of their shape."""
    if x.ndim != 2 or x.shape != ids.shape:
        return x
    fill = value if x is ids or not _is_mask(x) else (0 if float(x[ids == value].float().mean()) < 0.5 else 1)
    return torch.cat([x, torch.full_like(x[:, :1], fill).expand(-1, EXTRA)], 1)


def _is_mask(x: Tensor) -> bool:
    return x.dtype == torch.bool or bool(((x == 0) | (x == 1)).all())


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
