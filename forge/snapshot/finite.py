"""Refuse to write a state that is not finite: no checkpoint and no export holds a NaN or an infinity by mistake.

Looked at are parameters and persistent buffers, the averages of them that plugins keep, and the optimizers' tensors of
a parameter's shape. What held an infinity when the fit began, such as a mask of -inf, may hold it. A buffer is looked
at only if it was finite then, and has the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from forge import registry
from forge.checkpoint import Checkpoints
from forge.checkpoint.sharding import on_one_rank
from forge.contract.run import Run
from forge.errors import NonFiniteError
from forge.util.text import few

HALF = "They are float16, in which Adam's eps of 1e-08 is zero: keep the weights in float32"

_finite_at_start: WeakKeyDictionary[nn.Module, dict[str, torch.Size]] = WeakKeyDictionary()
"""By task: the tensors that were finite when its fit began, and their shapes."""


def note_start(task: nn.Module) -> None:
    """Note which of a task's tensors are finite as a fit begins."""
    state = _tensors({**dict(task.named_parameters(remove_duplicate=False)), **dict(task.named_buffers())})
    bad = set(not_finite(state.items()))
    _finite_at_start[task] = {name: tensor.shape for name, tensor in state.items() if name not in bad}


def may_be_infinite(task: nn.Module, name: str) -> bool:
    """Whether a tensor of the task was not finite when the fit began."""
    return task in _finite_at_start and name not in _finite_at_start[task]


def refuse_non_finite(trainer: Run, model: Mapping[str, Any], plugin_states: Mapping[str, Any] | None = None) -> None:
    """Raise NonFiniteError if what is about to be written is not finite; on all ranks, if it is so on one."""
    names = [*_bad_weights(trainer.task, model, plugin_states or {}), *_bad_optimizer_state(trainer)]
    if trainer.env.world > 1 and trainer.env.all_max([len(names)])[0]:
        names = [name for by_rank in trainer.env.gather(names) for name in by_rank]
    if names:
        raise NonFiniteError(_explain(trainer, list(dict.fromkeys(names))))


def _bad_weights(task: nn.Module, model: Mapping[str, Any], plugin_states: Mapping[str, Any]) -> Iterator[str]:
    parameters = {name for name, _ in task.named_parameters(remove_duplicate=False)}
    start = _finite_at_start.get(task, {})
    averages = {
        plugin: _tensors(state["weights"])
        for plugin, state in plugin_states.items()
        if isinstance(state, Mapping) and isinstance(state.get("weights"), Mapping)
    }
    for plugin, tensors in {"": _tensors(model), **averages}.items():
        for name in not_finite(tensors.items()):
            if name in parameters:
                bad = not may_be_infinite(task, name) or bool(values_of(tensors[name]).isnan().any())
            else:
                bad = start.get(name) == tensors[name].shape
            if bad:
                yield f"{name} in the average of {plugin}" if plugin else name


def _bad_optimizer_state(trainer: Run) -> Iterator[str]:
    names = {id(parameter): name for name, parameter in trainer.task.named_parameters()}
    for optimizer in trainer.optimizers.values():
        for parameter, state in _states(optimizer):
            if id(parameter) in names and isinstance(state, Mapping):
                own = {key: value for key, value in _tensors(state).items() if value.shape == parameter.shape}
                for key in not_finite(own.items()):
                    yield f"the optimizer's {key} of {names[id(parameter)]}"


def _states(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the states by parameter: an optimizer's own, and those of the optimizers that it wraps."""
    waiting, seen = [optimizer], set()
    while waiting:
        found = waiting.pop()
        if id(found) not in seen and hasattr(found, "param_groups"):
            seen.add(id(found))
            own = getattr(found, "state", None)
            yield from own.items() if isinstance(own, Mapping) else ()
            waiting.extend(getattr(found, "__dict__", {}).values())


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and not is_lazy(value)}


def not_finite(named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Return the names of the tensors with a NaN or an infinity in this rank's part. An accelerator is read once."""
    found = [(name, values_of(tensor)) for name, tensor in named if tensor is not None and _can_be_infinite(tensor)]
    away = [torch.isfinite(values).all() for _, values in found if values.device.type != "cpu"]
    answers = iter(torch.stack([flag.to(away[0].device) for flag in away]).tolist() if away else ())
    return [n for n, values in found if not (is_finite(values) if values.device.type == "cpu" else next(answers))]


def _can_be_infinite(tensor: Tensor) -> bool:
    """Whether a tensor has values that can be NaN: not on the meta device, and not faked for a plan."""
    has_values = not tensor.is_meta and not hasattr(tensor, "fake_mode")
    return has_values and (tensor.is_floating_point() or tensor.is_complex())


def values_of(tensor: Tensor) -> Tensor:
    """Return the real values to check: this rank's part, a sparse tensor's entries, both parts of complex numbers."""
    values = on_one_rank(tensor.detach() if tensor.requires_grad else tensor)
    if values.layout is not torch.strided:
        values = values.coalesce().values() if values.layout is torch.sparse_coo else values.values()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.float() if values.itemsize == 1 else values


def is_finite(values: Tensor) -> bool:
    """Whether no entry is NaN or infinite. The sum is the cheapest check; where it overflows, an exact one decides."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def _explain(trainer: Run, names: list[str]) -> str:
    verb = "is" if len(names) == 1 else "are"
    kept = Checkpoints(trainer.run_dir / "checkpoints").all() if trainer.run_dir is not None else []
    text = [
        f"After update {trainer.progress.update}: {few(names)} {verb} not finite. Such a state is "
        "saved neither as a checkpoint nor as weights.",
        f"The last good checkpoint is {kept[-1]}." if kept else "",
        *registry.cures("non_finite", beside=trainer.stack),
        HALF + registry.advice("dtypes", ", and use {}") + "." if is_half(trainer.task, names) else "",
    ]
    return " ".join(filter(None, text))


def is_half(task: nn.Module, names: Iterable[str]) -> bool:
    """Whether any of these parameters is float16."""
    wanted = set(names)
    return any(p.dtype is torch.float16 for name, p in task.named_parameters() if name in wanted)
