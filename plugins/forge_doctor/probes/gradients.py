"""Probes of gradients on their way to the weights: hooks, clamps, reversals, optimizers and what they keep."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from forge.data.accumulation_windows import batch_size
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, named, parameters
from forge_doctor.probes.graph import leaves, nodes, own_functions
from forge_doctor.watch import StepWatch

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
        text = _rows_removed(name, p.grad, after)
        if text:
            yield Finding("gradient_hook", text, name)
            return
        shrunk[name] = float(after.norm()) / float(p.grad.norm())
    little = [name for name, ratio in shrunk.items() if ratio < SMALL]
    meant = all(shrunk[name] == 0 for name in little) and len(little) < len(parameters(task))
    if little and not meant:
        worst = max(shrunk[name] for name in little)
        yield Finding(
            "gradient_hook",
            f"Hooks leave {worst:.2g} of the gradients, or less, of {len(little)} parameters: {named(little)}.",
            little[0],
            {"left": worst, "parameters": little[:8]},
        )


def _through(found: list[Any], gradient: Tensor) -> Tensor:
    for hook in found:
        changed = hook(gradient.clone())
        gradient = changed if isinstance(changed, Tensor) else gradient
    return gradient


def _rows_removed(name: str, before: Tensor, after: Tensor) -> str:
    """A matrix of which a hook lets a few rows train, though not the last ones, which may have been added."""
    if before.ndim != 2 or before.shape != after.shape:
        return ""
    had, has = before.abs().sum(1) > 0, after.abs().sum(1) > 0
    lost = had & ~has
    if int(had.sum()) < 16 or not bool(has.any()) or float(lost.sum()) < 0.9 * float(had.sum()):
        return ""
    if int(has.nonzero().max()) > int(lost.nonzero().max()):
        return ""
    return f"A hook removes the gradient of {int(lost.sum())} of the {int(had.sum())} rows of {name} that have one."


def repeated(patient: Patient) -> Iterator[Finding]:
    """Lists of modules that hold one module several times."""
    for path, module in patient.task.named_modules():
        if type(module) not in (nn.ModuleList, nn.Sequential):
            continue
        inner = [child for child in module._modules.values() if child is not None]
        counts = Counter(id(child) for child in inner if any(p.requires_grad for p in child.parameters()))
        if counts and max(counts.values()) > 1:
            times = max(counts.values())
            yield Finding(
                "repeated_module",
                f"{path} holds one module {times} times: its {len(inner)} layers share one set of weights.",
                path,
                {"times": times},
            )
            return


def left_over(patient: Patient) -> Iterator[Finding]:
    """An optimizer's own zero_grad that leaves gradients though its step uses them."""
    for name, entry in patient.trainer.optimizers.entries.items():
        kind = type(entry.optimizer)
        if kind.zero_grad is torch.optim.Optimizer.zero_grad or not isinstance(entry.optimizer, torch.optim.Optimizer):
            continue
        twin = _twin(entry.optimizer)
        weights = [p for group in twin.param_groups for p in group["params"] if p.requires_grad]
        left = 0
        for _ in range(4):
            before = [p.detach().clone() for p in weights]
            for p in weights:
                p.grad = torch.ones_like(p)
            twin.step()
            moved = any(not torch.equal(p, old) for p, old in zip(weights, before, strict=True))
            twin.zero_grad()
            left += moved and any(p.grad is not None and bool(p.grad.any()) for p in weights)
        if left >= 2:
            yield Finding(
                "gradients_left",
                f"{kind.__name__}.zero_grad leaves gradients after {left} of 4 steps that moved the weights: they are "
                "added to the next ones.",
                name or kind.__name__,
                {"left": left},
            )
            return


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy with parameters of its own; copy.deepcopy would lose the attributes of the user's class."""
    twin = object.__new__(type(optimizer))
    vars(twin).update(copy.deepcopy({name: value for name, value in vars(optimizer).items() if name != "step"}))
    return twin


def decay(patient: Patient) -> Iterator[Finding]:
    """Groups of which norms and biases decay and weight matrices do not."""
    for entry in patient.trainer.optimizers.entries.values():
        decays: dict[bool, set[float]] = {True: set(), False: set()}
        for group in entry.optimizer.param_groups:
            for p in group["params"]:
                decays[p.ndim > 1].add(float(group.get("weight_decay") or 0))
        if decays[True] == {0.0} and decays[False] and min(decays[False]) >= 1e-4:
            found = max(decays[False])
            yield Finding(
                "weight_decay",
                f"Norms and biases decay by {found:g} and weight matrices by 0: the groups are exchanged.",
                "configure_optimizers",
                {"weight_decay": found},
                cure="Decay the matrices, and leave norms and biases alone.",
            )
            return


def other_players(patient: Patient) -> Iterator[Finding]:
    """Terms of an optimizer's loss that reach the parameters of others, and none of its own."""
    if len(patient.names) < 2:
        return
    task = patient.clone()
    names = {id(p): name for name, p in patient.trainer.task.named_parameters()}
    mine = dict(task.named_parameters())
    owned = {
        key: {id(mine[names[id(p)]]) for p in patient.trainer.optimizers.parameters(key) if id(p) in names}
        for key in patient.names
    }
    for key in patient.names:
        watch = StepWatch(batch_size(patient.batches[0]))
        with watch:
            loss = patient.loss(task, patient.batches[0], key)
        inside = {id(node) for node in nodes(loss)}
        terms = [(call.input, call.where) for call in watch.losses if isinstance(call.input, Tensor)]
        others = set().union(*(owned[other] for other in patient.names if other != key)) - owned[key]
        for term, line in [*terms, *watch.terms]:
            if term.grad_fn is None or id(term.grad_fn) not in inside:
                continue
            reached = {id(leaf) for leaf in leaves(term)}
            if reached & others and not reached & owned[key]:
                yield Finding(
                    "no_gradient",
                    f"A term of the loss of {key!r} reaches the parameters of other optimizers and none of its own: it "
                    "trains nothing.",
                    line,
                    {"optimizer": key},
                )
                return


def reversals(patient: Patient) -> Iterator[Finding]:
    """A reversed gradient that stands before two losses and more, and before all of them."""
    if len(patient.names) > 1:
        return
    task = patient.clone()
    watch = StepWatch(batch_size(patient.batches[0]))
    with watch:
        loss = patient.loss(task, patient.batches[0])
    turned = _turned(loss)
    calls = [call.input for call in watch.losses if isinstance(call.input, Tensor) and call.input.requires_grad]
    if not turned or len(calls) < 2:
        return
    every = [{id(leaf) for leaf in leaves(x)} for x in calls]
    straight = set().union(*(_past(x, turned) for x in calls))
    known = {id(p): name for name, p in parameters(task).items()}
    both = [name for key, name in known.items() if sum(key in found for found in every) > 1 and key not in straight]
    if both:
        yield Finding(
            "wrong_gradient",
            f"The gradients of {len(calls)} losses reach {named(both)} reversed, and none reaches them as it is: these "
            "parameters are trained to make every loss larger.",
            both[0],
            {"parameters": both[:8]},
            cure="Reverse the gradient of the adversary alone.",
        )


def _turned(loss: Tensor) -> set[Any]:
    """Nodes of hand-written functions that turn a gradient round."""
    turned: set[Any] = set()

    def look(node: Any) -> Any:
        def hook(inputs: Any, outputs: Any) -> None:
            a, b = inputs[0], outputs[0]
            fits = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and bool(a.any())
            if fits and float(torch.cosine_similarity(a.flatten(), b.flatten(), 0)) < -0.999:
                turned.add(node)

        return hook

    handles = [node.register_hook(look(node)) for node in own_functions(loss)]
    if handles:
        loss.backward()
    for handle in handles:
        handle.remove()
    return turned


def _past(x: Tensor, turned: set[Any]) -> set[int]:
    """The leaves that a graph reaches without a turned gradient."""
    seen: set[Any] = set()
    todo, found = [x.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen or node in turned:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        todo.extend(child for child, _ in node.next_functions)
    return found
