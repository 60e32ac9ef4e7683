"""Answers: what the last layers of a task give, as free tensors, so that loss and metrics can be examined alone.

The answers are the outputs of layers with weights between which and the loss no other such layer stands. They are found
in the graph of the loss. Every layer with weights then returns what it returned before, and the answers what they are
told to: a step on given answers costs what the loss costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forge.contract.task import TaskModule
from forge.torch_internals import pytree
from forge_doctor.patient import Patient, like, loss_of, numbers, own_state_kept

Place = tuple[str, int, int]
"""A module's path, the number of its call, and the number of the tensor among its output."""
MOST_NUMBERS = 2_000_000
"""Numbers of answers that are still optimised."""
STEPS = 120
FARTHER = 4
"""How often the best answers are taken twice as far from where they began."""


def own_weights(task: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that have parameters themselves."""
    for path, module in task.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            yield path, module


@contextmanager
def layer_calls(task: nn.Module, noted: Any, every: bool = False) -> Iterator[None]:
    """Call `noted(path, number, output)` after each call of a layer with weights; what it returns is the output.

    `every`: of all modules, not only of those with weights of their own.
    """
    counts: Counter[str] = Counter()

    def hook(path: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            counts[path] += 1
            return noted(path, counts[path] - 1, output)

        return after

    modules = task.named_modules() if every else own_weights(task)
    handles = [module.register_forward_hook(hook(path)) for path, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Answers:
    """The answers of a task to a batch, and the task with all its layers held."""

    patient: Patient
    task: TaskModule
    batch: Any
    given: dict[Place, Tensor]
    "The answers by place."
    held: dict[tuple[str, int], Any]
    "What each call of a layer returned."
    loss: float
    used: set[tuple[str, int]] = field(default_factory=set)
    "The answers that the last step asked for."
    stage: str = "train"
    "Whose loss is asked for."
    found: dict[bool, tuple[float, list[Tensor]]] = field(default_factory=dict)
    "The best answers, and the best one answer for all samples."

    def __post_init__(self) -> None:
        self._same = {call: self._first_alike(call) for call in self.held}
        "The call with the same output, for calls of an answer's layer: a step may ask twice, for metrics and loss."

    def _first_alike(self, call: tuple[str, int]) -> tuple[str, int]:
        own = pytree.tree_leaves(self.held[call])
        for path, number in dict.fromkeys(place[:2] for place in self.given):
            theirs = pytree.tree_leaves(self.held[path, number])
            alike = [isinstance(x, Tensor) and isinstance(y, Tensor) and torch.equal(x, y) for x, y in zip(own, theirs)]  # noqa: B905
            if path == call[0] and len(own) == len(theirs) and all(alike):
                return path, number
        return call

    @property
    def values(self) -> list[Tensor]:
        return list(self.given.values())

    @property
    def paths(self) -> list[str]:
        return list(dict.fromkeys(path for path, _, _ in self.given))

    def step(self, values: list[Tensor], batch: Any = None, stage: str = "train") -> Any:
        """Run a step on these answers; what it collects is let go of."""
        with own_state_kept(self.task):
            return self._step(values, batch, stage)

    def _step(self, values: list[Tensor], batch: Any, stage: str) -> Any:
        told = dict(zip(self.given, values, strict=True))
        self.used = set()

        def noted(path: str, number: int, output: Any) -> Any:
            path, number = self._same.get((path, number), (path, number))
            is_answer = any(place[:2] == (path, number) for place in told)
            if is_answer:
                self.used.add((path, number))
            ran = any(True for _ in self.task.get_submodule(path).children())  # on what the layers inside it gave
            kept = output if ran else self.held.get((path, number))  # copied below: a step may write into it
            if ran and not is_answer:
                return output
            if kept is None:
                raise LookupError(f"call {number} of {path}")
            flat, shape = pytree.tree_flatten(kept)
            places = [told.get((path, number, i), x) for i, x in enumerate(flat)]
            return pytree.tree_unflatten([x.clone() if isinstance(x, Tensor) else x for x in places], shape)

        task = like(self.task, self.patient.task) if stage == "train" else self.task.eval()
        with _idle(task), layer_calls(task, noted):
            return self.patient.run(task, self.batch if batch is None else batch, stage)

    def metrics(self, values: list[Tensor]) -> dict[str, float] | None:
        """What a validation of these answers says, its end included; None where it asks other layers."""
        try:
            with torch.no_grad(), own_state_kept(self.task):
                said = self._step(values, None, "val")
                ended = self.task.evaluation_end("val")
        except LookupError:
            return None
        return None if self.used != {place[:2] for place in self.given} else {**numbers(said), **numbers(ended or {})}

    def loss_at(self, values: list[Tensor], batch: Any = None) -> Tensor:
        return loss_of(self.step(values, batch, self.stage))

    def slopes(self, values: list[Tensor] | None = None, batch: Any = None) -> list[Tensor]:
        """The gradient of the loss by the answers."""
        free = [x.detach().clone().requires_grad_() for x in (self.values if values is None else values)]
        found = torch.autograd.grad(self.loss_at(free, batch), free, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(free, found, strict=True)]

    def best(self, constant: bool = False) -> tuple[float, list[Tensor]]:
        """Minimise the loss over the answers, or over one answer that all samples get; the lowest loss, and where."""
        if constant not in self.found:
            self.found[constant] = self._minimised(constant)
        return self.found[constant]

    def _minimised(self, constant: bool) -> tuple[float, list[Tensor]]:
        spread = [max(float(x.float().std()) if x.numel() > 1 else 0.0, 0.3) for x in self.values]
        start = [x.detach().clone() for x in self.values]
        if constant:
            start = [x.mean(0, keepdim=True) if x.ndim else x for x in start]
        us = [x.requires_grad_() for x in start]
        whole = lambda: [u.expand_as(x).contiguous() if u.ndim else u for u, x in zip(us, self.values, strict=True)]  # noqa: E731
        adam = torch.optim.Adam([{"params": [u], "lr": 0.3 * s} for u, s in zip(us, spread, strict=True)])
        origin = [x.detach().clone() for x in whole()]
        lowest, found = float("inf"), origin
        for number in range(STEPS):
            if number == 2 * STEPS // 3:
                for group in adam.param_groups:
                    group["lr"] *= 0.1
            adam.zero_grad()
            loss = self.loss_at(whole())
            value = float(loss.detach())
            if value != value:
                break
            if value < lowest:
                lowest, found = value, [x.detach().clone() for x in whole()]
            loss.backward()
            adam.step()
        for _ in range(FARTHER):  # in the same direction, while the loss falls: the minimum of a logarithm is far away
            given = [2 * x - y for x, y in zip(found, origin, strict=True)]
            value = self.value_at(given)
            if not value < lowest:
                break
            lowest, found = value, given
        return lowest, found

    def value_at(self, values: list[Tensor]) -> float:
        with torch.no_grad():
            return float(self.loss_at(values))


@contextmanager
def _idle(task: nn.Module) -> Iterator[None]:
    """Layers do not compute: their hooks say what they return. A layer whose forward runs others must run."""
    idle = [
        module
        for _, module in own_weights(task)
        if not any(True for _ in module.children()) and "forward" not in vars(module)
    ]
    for module in idle:
        module.forward = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for module in idle:
            del module.forward


def held_of(patient: Patient, batch: Any) -> Answers | None:
    """The answers to a batch of the patient's own, of a task with one optimizer, found once."""
    key = (id(batch), patient.updates)
    if key not in patient.held:
        patient.held[key] = answers(patient, batch) if len(patient.names) == 1 else None
    return patient.held[key]


def validated(patient: Patient, batch: Any) -> Answers | None:
    """The answers to a batch of val, judged by validation's own loss; by that of training where it returns none."""
    try:
        found = answers(patient, batch, stage="val")
    except KeyError:  # it returns no loss
        found = None
    return found or held_of(patient, batch)


def answers(patient: Patient, batch: Any, stage: str = "train") -> Answers | None:
    """Find the answers of a task to a batch; None where the loss is not computed from outputs of layers alone."""
    task = patient.clone() if stage == "train" else patient.clone().eval()
    calls: dict[tuple[str, int], Any] = {}

    def noted(path: str, number: int, output: Any) -> Any:
        calls[path, number] = output
        return output

    with torch.enable_grad(), own_state_kept(task), layer_calls(task, noted):
        loss = loss_of(patient.run(task, batch, stage))
    if not isinstance(loss, Tensor) or loss.grad_fn is None or loss.numel() != 1:
        return None
    made: dict[Any, list[tuple[Place, Tensor]]] = {}
    for (path, number), output in calls.items():
        for i, x in enumerate(pytree.tree_leaves(output)):
            if isinstance(x, Tensor) and x.grad_fn is not None and x.is_floating_point():
                made.setdefault(x.grad_fn, []).append(((path, number, i), x))
    order = {(path, number): i for i, (path, number) in enumerate(calls)}
    found: dict[Place, Tensor] = {}
    for node in _frontier(loss, set(made)):
        place, x = min(made[node], key=lambda item: order[item[0][:2]])  # the innermost of modules that pass it on
        found[place] = x.detach()
    found = dict(sorted(found.items(), key=lambda item: order[item[0][:2]]))
    if not found or sum(x.numel() for x in found.values()) > MOST_NUMBERS:
        return None
    held = {
        key: pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, out) for key, out in calls.items()
    }
    whole = Answers(patient, task, batch, found, held, float(loss.detach()), stage=stage)
    try:
        again = float(whole.loss_at(whole.values).detach())
    except Exception:  # a step that needs more of its layers than what they return
        return None
    return whole if abs(again - whole.loss) <= 1e-4 * abs(whole.loss) + 1e-6 else None


def _frontier(loss: Tensor, made: set[Any]) -> list[Any]:
    """The nodes of outputs that a walk back from the loss meets first."""
    seen: set[Any] = set()
    todo, found = [loss.grad_fn], []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in made:
            found.append(node)
        else:
            todo.extend(child for child, _ in node.next_functions)
    return found
