"""Save, compare and restore the state of optimizers and schedules, by the task's parameter names."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from forge.checkpoint import sharding
from forge.checkpoint.strides import row_major, strides_to_note, with_strides
from forge.errors import CheckpointError
from forge.optim.naming import ParameterNames, saved_groups

if TYPE_CHECKING:
    from forge.optim.optimizers import OptimizerEntry, Optimizers
    from forge.optim.schedule_stepping import ScheduledLR

logger = logging.getLogger("forge")

Options = list[dict[str, Any]]
"""Plain options of every parameter group."""


class KeptOption(NamedTuple):
    """An option that a resumed optimizer takes from its checkpoint instead of the code."""

    optimizer: str
    option: str
    used: Any
    given: Any


def save(optimizers: Optimizers, task: nn.Module) -> dict[str, Any]:
    """Return the state of every optimizer with its schedules, by name ("" for a single one)."""
    names = _names(task)
    return {name or "": _saved(entry, names) for name, entry in optimizers.entries.items()}


def _saved(entry: OptimizerEntry, names: Mapping[int, str]) -> dict[str, Any]:
    known = _known(entry, names)
    state = known.write(entry.optimizer.state_dict())
    rehearse(entry, state, known)
    strides = {label: strides_to_note(p) for label, p in zip(known.labels, known.parameters, strict=True)}
    saved = {
        "class": type(entry.optimizer).__name__,
        "optimizer": state,
        "schedules": [_saved_schedule(item) for item in entry.schedules],
        "given": entry.given,
        "strides": {label: noted for label, noted in strides.items() if noted is not None},
    }
    if entry.has_modes:  # the checkpoint's model has the weights for evaluation
        saved["training"] = dict(zip(known.labels, known.parameters, strict=True))
    return saved if saved_groups(state) else saved | {"groups": _group_labels(entry, known)}


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
        _refuse_other_groups(entry, there, names, where)


def load(optimizers: Optimizers, saved: Mapping[str, Any], task: nn.Module) -> None:
    """Restore a state of `save` that `refuse_others` has accepted."""
    names, optimizers.kept = _names(task), []
    for name, entry in optimizers.entries.items():
        there = saved[name or ""]
        then = there.get("given") or saved_groups(there["optimizer"])
        for option in kept_options(type(entry.optimizer).__name__, entry.given, then):
            logger.warning("%s continues with %s=%r from the checkpoint; %r is ignored.", *option)
            optimizers.kept.append(option)
        entry.given = there.get("given") or entry.given
        known = _known(entry, names)
        wanted = _laid_out(_held_here(known.read(there["optimizer"])), known, there.get("strides"))
        _load(entry.optimizer, wanted)
        entry.trial = None
        if entry.has_modes:
            _set_training(entry, there.get("training"), known)
        for item, kept in zip(entry.schedules, there["schedules"], strict=True):
            _load_schedule(item, kept)


def _names(task: nn.Module) -> dict[int, str]:
    """Return the task's name of every parameter, by identity."""
    return {id(parameter): name for name, parameter in task.named_parameters()}


def _known(entry: OptimizerEntry, names: Mapping[int, str]) -> ParameterNames:
    parameters = entry.parameters
    return ParameterNames(parameters, [names.get(id(p), f"(parameter {i})") for i, p in enumerate(parameters)])


def _group_labels(entry: OptimizerEntry, known: ParameterNames) -> list[list[str]]:
    labels = iter(known.labels)
    return [[next(labels) for _ in group["params"]] for group in entry.optimizer.param_groups]


def _refuse_other_groups(entry: OptimizerEntry, there: Mapping[str, Any], names: Mapping[int, str], where: str) -> None:
    now, kind = _group_labels(entry, _known(entry, names)), type(entry.optimizer).__name__
    then = there.get("groups") or [group["params"] for group in saved_groups(there["optimizer"])]
    if now == then:
        return
    number = next((i for i, pair in enumerate(zip(now, then, strict=False)) if pair[0] != pair[1]), None)
    if number is None:
        raise CheckpointError(
            f"{where}: {kind} had {len(then)} parameter groups, and now has {len(now)}. Add groups that were added "
            "during training in configure_optimizers."
        )
    odd = set(now[number]) ^ set(then[number])
    raise CheckpointError(
        f"{where}: parameter group {number} of {kind} has changed; it differs in "
        f"{', '.join(sorted(odd)[:3]) or 'its order'}. Build the optimizer as before."
    )


# -- restoring an optimizer -------------------------------------------------------------------------------------------


def _load(optimizer: Optimizer, wanted: Any) -> None:
    """Restore an optimizer through its own `load_state_dict`, then what that changes: dtypes and strides.

    torch casts state to the parameter's dtype; a copy to another device drops gaps. torch's `state_dict` returns the
    live state, so the corrections are written there. An optimizer with methods of its own is compared afterwards.
    """
    optimizer.load_state_dict(_copied_containers(wanted))
    _correct(optimizer.state_dict(), wanted)
    if not is_standard(optimizer):
        found = next(state_differences(optimizer.state_dict(), wanted), None)
        if found is not None:
            raise CheckpointError(
                f"{type(optimizer).__name__}.load_state_dict does not restore what its state_dict returned: {found} "
                "differs, so a run with it cannot be resumed exactly. Correct these methods, or use another optimizer."
            )


def _held_here(state: Any) -> Any:
    """Return a state without that of parameters whose state other ranks hold: it has no values here."""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return state
    return {**state, "state": {key: value for key, value in state["state"].items() if not _is_elsewhere(value)}}


def _is_elsewhere(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_elsewhere, value.values()))
    return (
        any(map(_is_elsewhere, value)) if type(value) in (list, tuple) else isinstance(value, Tensor) and value.is_meta
    )


def is_standard(optimizer: Any) -> bool:
    """Whether an optimizer saves and restores itself by torch's own methods."""
    kind = type(optimizer)
    return all(getattr(kind, name, None) is getattr(Optimizer, name) for name in ("state_dict", "load_state_dict"))


def unused_copy(optimizer: Any) -> Any:
    """Return a copy of a new optimizer over the same parameters, to try a restore on; None where that is not needed
    (torch's own methods), or not possible."""
    if is_standard(optimizer):
        return None
    try:
        made = _copied(optimizer, {id(p): p for group in optimizer.param_groups for p in group["params"]})
        same = not any(state_differences(made.state_dict(), optimizer.state_dict()))
    except Exception:  # an optimizer that cannot be copied is tried when it is resumed
        return None
    return made if same else None


def _copied(optimizer: Any, memo: dict[int, Any]) -> Any:
    """Return a copy with all attributes, which torch's own copy leaves out; `memo`: what stands for what, by id."""
    made = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(optimizer).items()})
    return made


def fails_without_closure(optimizer: Any) -> bool:
    """Whether a step needs the closure that its signature leaves free, as those of sharpness-aware optimizers do.

    Copies over parameters of one element are stepped: one without a closure fails, one with it does not.
    """
    holds_model = any(isinstance(value, nn.Module) for value in vars(optimizer).values())
    if type(optimizer).__module__.partition(".")[0] == "torch" or holds_model:
        return False

    def works(closures: int) -> bool:
        given = [p for group in optimizer.param_groups for p in group["params"]]
        small = {id(p): nn.Parameter(torch.ones([1] * p.ndim), p.requires_grad) for p in given}

        def evaluate() -> Tensor:
            for p in small.values():
                p.grad = torch.ones_like(p) if p.requires_grad else None
            return torch.ones(())

        evaluate()
        try:
            _copied(optimizer, dict[int, Any](small)).step(*[evaluate] * closures)
        except Exception:
            return False
        return True

    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[]):
        return not works(0) and works(1)


def rehearse(entry: OptimizerEntry, state: Any, known: ParameterNames) -> None:
    """Restore a saved state into a copy of the new optimizer, before the first checkpoint relies on it: with the state
    that the run begins with, and with that after the first update."""
    if entry.trial is None:
        return
    target, entry.rehearsals = entry.trial, entry.rehearsals + 1
    entry.trial = None if entry.rehearsals > 1 else unused_copy(target)
    try:
        _load(target, copy.deepcopy(known.read(state), {id(p): p for p in known.parameters}))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{type(entry.optimizer).__name__}.load_state_dict cannot restore what its state_dict returns "
            f"({type(error).__name__}: {error}), so a run with it could not be resumed. Correct these methods, use "
            "another optimizer, or train without a plugin that saves checkpoints."
        ) from error


def _copied_containers(value: Any) -> Any:
    """Return a state with dicts and lists of its own, as an optimizer may keep and change what it is given."""
    if type(value) is dict:
        return {key: _copied_containers(item) for key, item in value.items()}
    return type(value)(map(_copied_containers, value)) if type(value) in (list, tuple) else value


def _laid_out(state: Any, known: ParameterNames, strides: Mapping[str, list[int]] | None) -> Any:
    """Return a saved state with the strides that it has in this run.

    A state that had the strides of its parameter follows it, if the parameter has other strides now: a fused kernel
    walks both in memory order. Checkpoints of older versions noted no strides: there every state follows.
    """
    saved = state.get("state") if isinstance(state, dict) else None
    if not isinstance(saved, dict):
        return state
    made = dict(saved)
    for i, (label, parameter) in enumerate(zip(known.labels, known.parameters, strict=True)):
        if i in saved and not sharding.is_distributed(parameter):
            then = None if strides is None else tuple(strides.get(label) or row_major(parameter.shape))
            if then != parameter.stride():
                made[i] = _following(saved[i], parameter, then)
    return {**state, "state": made}


def _following(value: Any, parameter: Tensor, then: tuple[int, ...] | None) -> Any:
    if isinstance(value, Tensor):
        same = value.shape == parameter.shape and then in (None, value.stride()) and not sharding.is_distributed(value)
        now = parameter.stride()
        return with_strides(value, now) if same and value.stride() != now and parameter.numel() else value
    if type(value) is dict:
        return {key: _following(item, parameter, then) for key, item in value.items()}
    return type(value)(_following(v, parameter, then) for v in value) if type(value) in (list, tuple) else value


def _correct(now: Any, wanted: Any) -> Any:
    """Correct dtypes and strides in a live state, in place where its containers allow; return the corrected value."""
    if isinstance(now, Tensor) and isinstance(wanted, Tensor):
        return _as_wanted(now, wanted)
    if isinstance(now, dict) and isinstance(wanted, dict):
        for key in now.keys() & wanted.keys():
            corrected = _correct(now[key], wanted[key])
            if corrected is not now[key]:
                now[key] = corrected
    elif type(now) is list and isinstance(wanted, (list, tuple)) and len(now) == len(wanted):
        now[:] = map(_correct, now, wanted)
    elif type(now) is tuple and type(wanted) is tuple and len(now) == len(wanted):
        corrected = tuple(map(_correct, now, wanted))
        return now if all(a is b for a, b in zip(corrected, now, strict=True)) else corrected
    return now


def _as_wanted(now: Tensor, wanted: Tensor) -> Tensor:
    if now.shape != wanted.shape:
        return now
    corrected = now if now.dtype == wanted.dtype else wanted.to(now.device)
    plain = not sharding.is_distributed(wanted) and not sharding.is_distributed(corrected)
    if plain and now.layout is torch.strided and wanted.numel() and corrected.stride() != wanted.stride():
        return with_strides(corrected, wanted.stride())
    return corrected


def state_differences(now: Any, wanted: Any, path: str = "") -> Iterator[str]:
    """Yield the path of every value in which two states differ; tensors by bits, dtype, shape and strides."""
    if isinstance(now, Tensor) and isinstance(wanted, Tensor):
        if not _same_tensor(now, wanted):
            yield path
    elif isinstance(now, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(key for key in now if key not in wanted)]:
            inner = f"{path}.{key}" if path else str(key)
            if key in now and key in wanted:
                yield from state_differences(now[key], wanted[key], inner)
            else:
                yield inner
    elif isinstance(now, (list, tuple)) and isinstance(wanted, (list, tuple)) and len(now) == len(wanted):
        for i, (a, b) in enumerate(zip(now, wanted, strict=True)):
            yield from state_differences(a, b, f"{path}.{i}")
    elif type(now) is not type(wanted) or (now != wanted and (now == now or wanted == wanted)):  # NaN is equal here
        yield path


def _same_tensor(now: Tensor, wanted: Tensor) -> bool:
    ours, theirs = (sharding.on_one_rank(tensor.detach()) for tensor in (now, wanted))
    alike = (ours.dtype, ours.shape, ours.layout) == (theirs.dtype, theirs.shape, theirs.layout)
    if not alike or (ours.layout is torch.strided and ours.numel() and ours.stride() != theirs.stride()):
        return False
    return torch.equal(_bytes(ours), _bytes(theirs.to(ours.device)))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _set_training(entry: OptimizerEntry, weights: Mapping[str, Tensor] | None, known: ParameterNames) -> None:
    """Set an optimizer with modes to training, with exactly the weights that training had."""
    entry.optimizer.train()  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        for label, parameter in zip(known.labels, known.parameters, strict=True):
            if weights is not None:
                parameter.copy_(weights[label])


def kept_options(kind: str, now: Iterable[Mapping[str, Any]], then: Iterable[Mapping[str, Any]]) -> list[KeptOption]:
    """Return the options in a checkpoint that differ from the code's, each once; a resumed run uses the saved ones."""
    found: list[KeptOption] = []
    for ours, theirs in zip(now, then, strict=False):
        rates = [float(group.get("initial_lr", group.get("lr", 0))) for group in (theirs, ours)]
        if rates[0] != rates[1]:
            found.append(KeptOption(kind, "lr", *rates))
        for key in ours:
            comparable = key in theirs and key not in ("params", "lr", "initial_lr")
            if comparable and type(ours[key]) in (bool, int, float, str, tuple) and ours[key] != theirs[key]:
                found.append(KeptOption(kind, key, theirs[key], ours[key]))
    return [option for i, option in enumerate(found) if option not in found[:i]]


# -- schedules --------------------------------------------------------------------------------------------------------


def _saved_schedule(item: ScheduledLR) -> dict[str, Any]:
    return {"class": type(item.schedule).__name__, "state": _plain(item.schedule.state_dict()), "moved": item.moved}


def _load_schedule(item: ScheduledLR, kept: Mapping[str, Any]) -> None:
    item.schedule.load_state_dict(_for_this_length(item.schedule, _counted(kept["state"])))
    item.moved = kept["moved"]


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
