"""Save, compare and restore the state of optimizers and schedules, by the task's parameter names."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from forge.errors import CheckpointError

if TYPE_CHECKING:
    from forge.optim.optimizers import Optimizers

logger = logging.getLogger("forge")


class KeptOption(NamedTuple):
    """An option that a resumed optimizer takes from its checkpoint instead of the code."""

    optimizer: str
    option: str
    used: Any
    given: Any


def save(optimizers: Optimizers, task: nn.Module) -> dict[str, Any]:
    """Return the state of every optimizer with its schedules, by name ("" for a single one)."""
    names = _names(task)
    return {
        name or "": {
            "class": type(entry.optimizer).__name__,
            "optimizer": _named(entry.optimizer, names),
            "schedules": [
                {"class": type(i.schedule).__name__, "state": _plain(i.schedule.state_dict()), "moved": i.moved}
                for i in entry.schedules
            ],
        }
        for name, entry in optimizers.entries.items()
    }


def refuse_others(optimizers: Optimizers, saved: Mapping[str, Any], task: nn.Module, where: str) -> None:
    """Raise CheckpointError if the checkpoint has other optimizers, schedules or parameters."""
    ours, theirs = [name or "" for name in optimizers.entries], list(saved)
    if sorted(ours) != sorted(theirs):
        raise CheckpointError(f"{where} has the optimizers {theirs}; configure_optimizers returns {ours}.")
    names = _names(task)
    for name, entry in optimizers.entries.items():
        there = saved[name or ""]
        now = [type(entry.optimizer).__name__, *(type(item.schedule).__name__ for item in entry.schedules)]
        then = [there["class"], *(item["class"] for item in there["schedules"])]
        if now != then:
            raise CheckpointError(
                f"{where} was trained with {' and '.join(then)}; this run has {' and '.join(now)}. Use the same, or "
                "start a new run from the weights."
            )
        _refuse_other_groups(entry.optimizer, there["optimizer"], names, where)


def load(optimizers: Optimizers, saved: Mapping[str, Any], task: nn.Module) -> None:
    """Restore a state of `save` that `refuse_others` has accepted."""
    names, optimizers.kept = _names(task), []
    for name, entry in optimizers.entries.items():
        there = saved[name or ""]
        for option in kept_options(entry.optimizer, there["optimizer"]["param_groups"]):
            logger.warning("%s continues with %s=%r from the checkpoint; %r is ignored.", *option)
            optimizers.kept.append(option)
        _load(entry.optimizer, there["optimizer"], names)
        for item, kept in zip(entry.schedules, there["schedules"], strict=True):
            item.schedule.load_state_dict(_for_this_length(item.schedule, _counted(kept["state"])))
            item.moved = kept["moved"]


def _names(task: nn.Module) -> dict[int, str]:
    """Return the task's name of every parameter, by identity."""
    return {id(parameter): name for name, parameter in task.named_parameters()}


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _labels(parameters: Iterable[Any], names: Mapping[int, str]) -> list[str]:
    return [names.get(id(p), f"(parameter {i})") for i, p in enumerate(parameters)]


def _named(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return `optimizer.state_dict()` with the names of parameters instead of numbers."""
    plain, labels = optimizer.state_dict(), _labels(_parameters(optimizer), names)
    return {
        **plain,
        "state": {labels[key] if isinstance(key, int) else key: value for key, value in plain["state"].items()},
        "param_groups": [{**group, "params": [labels[i] for i in group["params"]]} for group in plain["param_groups"]],
    }


def _refuse_other_groups(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[int, str], where: str) -> None:
    labels = iter(_labels(_parameters(optimizer), names))
    now = [[next(labels) for _ in group["params"]] for group in optimizer.param_groups]
    then = [group["params"] for group in saved["param_groups"]]
    if now == then:
        return
    number = next((i for i, pair in enumerate(zip(now, then, strict=False)) if pair[0] != pair[1]), None)
    if number is None:
        raise CheckpointError(
            f"{where}: {type(optimizer).__name__} had {len(then)} parameter groups, and now has {len(now)}. Add groups "
            "that were added during training in configure_optimizers."
        )
    odd = set(now[number]) ^ set(then[number])
    raise CheckpointError(
        f"{where}: parameter group {number} of {type(optimizer).__name__} has changed; it differs in "
        f"{', '.join(sorted(odd)[:3]) or 'its order'}. Build the optimizer as before."
    )


def _load(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
    number = {label: i for i, label in enumerate(_labels(_parameters(optimizer), names))}
    state = {number.get(key, key): value for key, value in saved["state"].items()}
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in saved["param_groups"]]
    optimizer.load_state_dict({**saved, "state": state, "param_groups": groups})
    for i, parameter in enumerate(_parameters(optimizer)):
        if i in state:
            optimizer.state[parameter] = _as_saved(state[i], optimizer.state[parameter], parameter)


def _as_saved(saved: Any, loaded: Any, parameter: Tensor) -> Any:
    """Restore the dtype, which torch casts to the parameter's, and the strides, which a file does not store.

    A fused kernel walks a parameter and its state in memory order, so their strides must be equal.
    """
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        if saved.shape == parameter.shape and saved.layout is torch.strided and not parameter.is_contiguous():
            return torch.empty_like(parameter, dtype=saved.dtype, device=loaded.device).detach().copy_(saved)
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _as_saved(value, loaded[key], parameter) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)) and isinstance(loaded, (list, tuple)):
        return type(saved)(_as_saved(a, b, parameter) for a, b in zip(saved, loaded, strict=True))
    return loaded


def kept_options(optimizer: Optimizer, saved: Iterable[Mapping[str, Any]]) -> list[KeptOption]:
    """Return the options in a checkpoint that differ from the code's, each once; a resumed run uses the saved ones."""
    found: list[KeptOption] = []
    kind = type(optimizer).__name__
    for now, then in zip(optimizer.param_groups, saved, strict=True):
        ours, theirs = (float(group.get("initial_lr", group.get("lr", 0))) for group in (now, then))
        if ours != theirs:
            found.append(KeptOption(kind, "lr", theirs, ours))
        for key in now:
            comparable = key in then and key not in ("params", "lr", "initial_lr")
            if comparable and type(now[key]) in (bool, int, float, str, tuple) and now[key] != then[key]:
                found.append(KeptOption(kind, key, then[key], now[key]))
    return [option for i, option in enumerate(found) if option not in found[:i]]


def _plain(state: Any) -> Any:
    """Return a schedule's state without MultiStepLR's Counter, a type that a checkpoint does not store."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_plain(value) for value in state)
    return state


def _counted(state: Any) -> Any:
    """Restore the Counter that `_plain` removed."""
    if isinstance(state, dict):
        return {
            key: Counter(value) if key == "milestones" and isinstance(value, dict) else _counted(value)
            for key, value in state.items()
        }
    return [_counted(value) for value in state] if type(state) is list else state


def _for_this_length(schedule: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """Replace the length of the run in OneCycleLR's state by the current one: the run may have been extended."""
    if isinstance(schedule, OneCycleLR):
        return saved | {"total_steps": schedule.total_steps, "_schedule_phases": schedule._schedule_phases}
    return saved
