"""FreeOutput: a copy of a task whose prediction is a free tensor, so that the loss alone can be examined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.contract.task import TaskModule
from forge.data.accumulation_windows import batch_size
from forge.torch_internals import pytree
from forge_doctor.patient import Patient, like, tensors
from forge_doctor.probes.graph import leaves
from forge_doctor.watch import OuterCall, origin, outermost_calls

MOST_NUMBERS = 2_000_000
"""Numbers of an output that is still optimised."""
STEPS = 80


@dataclass
class FreeOutput:
    """A task in which modules return what they are told to."""

    patient: Patient
    task: TaskModule
    calls: list[OuterCall]
    "Of the modules that make the prediction."
    batch: Any

    @property
    def raw(self) -> list[Tensor]:
        """What the model itself predicts: floating point tensors with a graph, of all calls in order."""
        return [x for call in self.calls for x in tensors(call.output) if _is_predicted(x)]

    def run(self, values: list[Tensor], batch: Any = None, stage: str = "train") -> tuple[Any, list[OuterCall]]:
        """Run a step on given predictions; return its output and the calls of modules that it made."""
        left = iter(values)
        for call in self.calls:
            output = pytree.tree_map(lambda x: next(left) if _is_predicted(x) else x, call.output)
            self.task.get_submodule(call.path).forward = lambda *args, output=output, **kwargs: output
        task = like(self.task, self.patient.task) if stage == "train" else self.task.eval()
        with outermost_calls(task) as made:
            result = self.patient.run(self.task, self.batch if batch is None else batch, stage)
        return result, made

    def loss(self, values: list[Tensor], batch: Any = None) -> Tensor:
        result = self.run(values, batch)[0]
        return result["loss"] if isinstance(result, dict) else result

    def gradients(self, values: list[Tensor], batch: Any = None) -> list[Tensor]:
        free = [x.detach().clone().requires_grad_() for x in values]
        found = torch.autograd.grad(self.loss(free, batch), free, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(free, found, strict=True)]


def _is_predicted(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad


def freed(patient: Patient, batch: Any) -> FreeOutput | None:
    """A task whose loss is a function of its prediction and the batch alone, or None where there is no such place."""
    size = batch_size(batch)
    if size is None or size < 4 or len(patient.names) > 1:
        return None
    task = patient.clone()
    with outermost_calls(task) as calls:
        loss = patient.loss(task, batch)
    counts = Counter(call.path for call in calls)
    usable = [call for call in calls if _predicts(task, call, size)]
    for number in (1, 2, 3):
        chosen = usable[-number:]
        if len(chosen) < number or any(counts[call.path] > 1 for call in chosen):
            return None
        found = FreeOutput(patient, patient.clone(), chosen, batch)
        free = [x.detach().clone().requires_grad_() for x in found.raw]
        try:
            again = found.loss(free)
        except Exception:  # a step that needs the graph of its model
            return None
        mine = {id(x) for x in free}
        if all(id(leaf) in mine for leaf in leaves(again)) and again.requires_grad:
            close = torch.allclose(again.detach(), loss.detach(), rtol=1e-4, atol=1e-6)
            return found if close and sum(x.numel() for x in free) <= MOST_NUMBERS else None
    return None


def _predicts(task: nn.Module, call: OuterCall, size: int) -> bool:
    """Whether a call has parameters and returns rows with a graph; a criterion has none."""
    trains = any(p.requires_grad for p in task.get_submodule(call.path).parameters())
    found = [x for x in tensors(call.output) if _is_predicted(x)]
    return trains and bool(found) and all(x.ndim and len(x) == size for x in found)


@dataclass
class Supervised:
    """A prediction with one target of the batch."""

    free: FreeOutput
    place: int
    "The place of the target among the tensors of a batch."
    target: Tensor
    real: Tensor | None
    "Positions that are no padding, of the shape of the target's first two dimensions."


def supervised(patient: Patient, batch: Any) -> Supervised | None:
    """The prediction and the one tensor of the batch that the loss sees and the model does not; computed once."""
    if id(batch) not in patient.supervised:
        patient.supervised[id(batch)] = _supervised(patient, batch)
    return patient.supervised[id(batch)]


def _supervised(patient: Patient, batch: Any) -> Supervised | None:
    free = freed(patient, batch)
    size = batch_size(batch)
    if free is None or size is None:
        return None
    alone = _seen_by_loss_alone(free, size)
    given = tensors(batch)
    for place in alone:
        others = [given[other] for other in alone if other != place]
        marks = [_real(x, given[place]) for x in others]
        if all(mark is not None for mark in marks) and len(marks) < 2:
            whole = Supervised(free, place, given[place], marks[0] if marks else None)
            return whole if _is_by_sample(whole, size) else None
    return None


def _seen_by_loss_alone(free: FreeOutput, size: int) -> list[int]:
    """Places of the tensors of a batch that change the loss and nothing that a module is given."""
    base, calls = free.run(free.raw)
    alone = []
    for place, x in enumerate(tensors(free.batch)):
        if not x.ndim or len(x) != size or torch.equal(x, x.roll(1, 0)):
            continue
        other, others = free.run(free.raw, changed(free.batch, place, lambda x: x.roll(1, 0)))
        if _same_inputs(free.task, calls, others) and not torch.equal(_loss(base), _loss(other)):
            alone.append(place)
    return alone


def _loss(result: Any) -> Tensor:
    return (result["loss"] if isinstance(result, dict) else result).detach()


def _same_inputs(task: nn.Module, calls: list[OuterCall], others: list[OuterCall]) -> bool:
    """Whether modules with parameters were given the same."""
    if [call.path for call in calls] != [call.path for call in others]:
        return False
    for a, b in zip(calls, others, strict=True):
        if any(True for _ in task.get_submodule(a.path).parameters()):
            pairs = zip(tensors((a.args, a.kwargs)), tensors((b.args, b.kwargs)), strict=True)
            if not all(x.shape == y.shape and torch.equal(x, y) for x, y in pairs):
                return False
    return True


def changed(batch: Any, place: int, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with another tensor at one place."""
    chosen = tensors(batch)[place]
    return pytree.tree_map(lambda x: change(x) if x is chosen else x, batch)


def _real(x: Tensor, target: Tensor) -> Tensor | None:
    """What a tensor of lengths, or a mask that begins with one value and ends with the other, says about padding."""
    if target.ndim < 2:
        return None
    steps = target.shape[1]
    if x.ndim == 1 and not x.is_floating_point() and int(x.min()) >= 1 and 2 < int(x.max()) <= steps:
        return torch.arange(steps, device=x.device) < x.unsqueeze(1)
    if x.shape != target.shape[:2] or not bool(((x == 0) | (x == 1)).all()):
        return None
    same = x == x[:1, :1]
    begins = bool(same[:, 0].all()) and bool((same.long().diff(dim=1) <= 0).all()) and not bool(same.all())
    return same if begins else None


def _is_by_sample(whole: Supervised, size: int) -> bool:
    """Whether a sample's gradient depends on its own target, not on those of the others."""
    half = size // 2
    other = changed(whole.free.batch, whole.place, lambda x: torch.cat([x[:half], x[-1:].expand_as(x[half:])]))
    raw = whole.free.raw
    mine = torch.cat([g[:half].flatten() for g in whole.free.gradients(raw)]).double()
    theirs = torch.cat([g[:half].flatten() for g in whole.free.gradients(raw, other)]).double()
    return bool(F.cosine_similarity(mine, theirs, dim=0) > 0.98)


@dataclass
class Shape:
    """How a prediction is to be read, and the numbers that it may have."""

    of: Callable[[Tensor], Tensor]
    start: Tensor
    middle: float = 0.0


def shape_of(x: Tensor, classes: int | None, scale: float) -> Shape:
    """The range of a prediction: probabilities, their logarithms, positive numbers, or any."""
    noise = 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    values = x.detach()
    if classes is not None and values.shape[classes] > 1:
        for of, back in ((torch.softmax, values), (torch.log_softmax, values.exp())):
            if bool(((back.sum(classes) - 1).abs() < 1e-3).all()) and bool((back >= 0).all()):
                return Shape(lambda u, of=of: of(u, classes), noise)
    if origin(x) == "Sigmoid":
        return Shape(torch.sigmoid, noise, 0.5)
    if bool((values >= 0).all()):
        return Shape(F.softplus, noise * scale)
    return Shape(lambda u: u, noise * 10 * scale)


def optimised(free: FreeOutput, shapes: list[Shape], rate: float, batch: Any = None) -> list[Tensor] | None:
    """Predictions that minimise the loss; None where it is not a number."""
    us = [shape.start.clone().requires_grad_() for shape in shapes]
    adam = torch.optim.Adam(us, rate)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(adam, STEPS)
    for _ in range(STEPS):
        adam.zero_grad()
        loss = free.loss([shape.of(u) for shape, u in zip(shapes, us, strict=True)], batch)
        if not bool(torch.isfinite(loss)):
            return None
        loss.backward()
        adam.step()
        slower.step()
    return [shape.of(u).detach() for shape, u in zip(shapes, us, strict=True)]
