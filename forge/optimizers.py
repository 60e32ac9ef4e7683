"""Optimizers: what `configure_optimizers` returned, by name, with its schedules.

One optimizer has the name None. A dict, even of one, gives names: the Trainer then fires `forge_train_step` once per
name, and passes it to `training_step`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from forge.errors import CheckpointError, TaskError
from forge.progress import Interval

if TYPE_CHECKING:
    from forge.step import Step

HOW_TO_RETURN = (
    "Return an optimizer, (optimizer, schedule), (optimizer, schedule, '1 epoch'), or a dict of those by name: "
    '{"generator": ..., "discriminator": ...}.'
)


@dataclass(slots=True)
class Schedule:
    """A learning-rate schedule and when it steps: per update, per interval, or by a metric after validation."""

    schedule: Any
    every: Interval | None = None
    monitor: str | None = None
    moved: bool = False
    "Whether its optimizer has stepped since this schedule last did."


@dataclass(slots=True)
class Entry:
    """One optimizer, the schedules that drive it, and the parameters it owns."""

    optimizer: Optimizer
    schedules: list[Schedule] = field(default_factory=list)
    needs_closure: bool = field(init=False)

    def __post_init__(self) -> None:
        closure = inspect.signature(type(self.optimizer).step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is closure.empty

    @property
    def parameters(self) -> list[nn.Parameter]:
        """As the optimizer has them now: groups may be added on the way."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]


class Optimizers(Mapping[str | None, Optimizer]):
    """The optimizers of a run by name; `named` says whether the task returned a dict."""

    def __init__(self, entries: Mapping[str | None, Entry]):
        self.entries = dict(entries)
        self.named = None not in self.entries
        self.has_schedules = any(entry.schedules for entry in self.entries.values())
        self.rates_used: dict[str, float] | None = None
        "The learning rates of the last update, once schedules have moved on from them."
        self.orphans: list[nn.Parameter] = []
        "Trainable parameters in no optimizer: their gradients are dropped after every window."

    @classmethod
    def from_task(cls, returned: Any, task: nn.Module) -> Optimizers:
        """Read what `configure_optimizers` returned; refuse anything else, and say what to return."""
        where = f"{type(task).__name__}.configure_optimizers"
        if isinstance(returned, Mapping):
            if "optimizer" in returned and "lr_scheduler" in returned:
                raise TaskError(f"{where} returned Lightning's dict. Return (optimizer, schedule) instead.")
            if not returned or not all(isinstance(name, str) and name for name in returned):
                raise TaskError(f"{where} returned a dict without names. {HOW_TO_RETURN}")
            return cls({name: _entry(value, f"{where}[{name!r}]") for name, value in returned.items()})
        return cls({None: _entry(returned, where)})

    def add_schedule(self, name: str | None, schedule: Schedule) -> None:
        """Let a schedule drive an optimizer, beside what the task returned."""
        self.entries[name].schedules.append(schedule)
        self.has_schedules = True

    def advance(self, step: Step) -> None:
        """Step every schedule that is due, if its optimizer has stepped since the last time."""
        self.rates_used = self.learning_rates()
        for name, entry in self.entries.items():
            updated = step.updated and (name is None or name in step.updated_names)
            for item in entry.schedules:
                item.moved |= updated
                due = item.every is None or item.every.due(step)
                if item.monitor is None and item.moved and due:
                    item.schedule.step()
                    item.moved = False

    def after_validation(self, metrics: Mapping[str, Any]) -> None:
        """Step the schedules that watch a metric."""
        for entry in self.entries.values():
            for item in entry.schedules:
                if item.monitor is not None:
                    if item.monitor not in metrics:
                        raise TaskError(
                            f"A ReduceLROnPlateau watches {item.monitor!r}, but validation gave "
                            f"{', '.join(sorted(metrics)) or 'nothing'}. Return (optimizer, schedule, metric)."
                        )
                    item.schedule.step(metrics[item.monitor])

    def learning_rates(self) -> dict[str, float]:
        """`lr`, or `lr/<name>`, with `/0`, `/1`, ... where parameter groups differ."""
        rates: dict[str, float] = {}
        for name, entry in self.entries.items():
            key = "lr" if name is None else f"lr/{name}"
            values = [float(group["lr"]) for group in entry.optimizer.param_groups if "lr" in group]
            if len(set(values)) > 1:
                rates |= {f"{key}/{i}": value for i, value in enumerate(values)}
            elif values:
                rates[key] = values[0]
        return rates

    @contextmanager
    def only(self, name: str | None) -> Iterator[None]:
        """Train one optimizer's parameters: all others have `requires_grad` off meanwhile."""
        own = {id(p) for p in self.entries[name].parameters}
        others = {id(p): p for entry in self.entries.values() for p in entry.parameters if id(p) not in own}
        resting = [p for p in others.values() if p.requires_grad]
        for parameter in resting:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in resting:
                parameter.requires_grad_(True)

    def parameters(self, name: str | None) -> list[nn.Parameter]:
        """The parameters of one optimizer, or of all for the name None."""
        if name in self.entries:
            return self.entries[name].parameters
        seen = {id(p): p for entry in self.entries.values() for p in entry.parameters}
        return list(seen.values())

    def state_dict(self, task: nn.Module) -> dict[str, Any]:
        """Optimizer and schedule states by name ("" where there is only one); parameters go by the task's names."""
        names = _names(task)
        return {
            name or "": {
                "optimizer": _named_state(entry.optimizer, names),
                "schedules": [{"state": item.schedule.state_dict(), "moved": item.moved} for item in entry.schedules],
            }
            for name, entry in self.entries.items()
        }

    def load_state_dict(self, state: Mapping[str, Any], task: nn.Module) -> None:
        """Take back what `state_dict` gave; other optimizers, parameters or schedules are refused by name."""
        names = _names(task)
        ours, theirs = [name or "" for name in self.entries], list(state)
        if sorted(ours) != sorted(theirs):
            raise CheckpointError(f"The checkpoint has the optimizers {theirs}, configure_optimizers gives {ours}.")
        for name, entry in self.entries.items():
            saved = state[name or ""]
            _load_named_state(entry.optimizer, saved["optimizer"], names)
            if len(saved["schedules"]) != len(entry.schedules):
                raise CheckpointError(
                    f"The checkpoint has {len(saved['schedules'])} learning-rate schedules for the optimizer "
                    f"{name or type(entry.optimizer).__name__}, this run has {len(entry.schedules)}."
                )
            for item, kept in zip(entry.schedules, saved["schedules"], strict=True):
                item.schedule.load_state_dict(_for_this_length(item.schedule, kept["state"]))
                item.moved = kept["moved"]
        self.rates_used = None

    def __getitem__(self, name: str | None) -> Optimizer:
        return self.entries[name].optimizer

    def __iter__(self) -> Iterator[str | None]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def drop_gradients(optimizer: Optimizer) -> None:
    """`optimizer.zero_grad(set_to_none=True)`, without the profiler range that makes torch's own cost 30 µs."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _names(task: nn.Module) -> dict[int, str]:
    """The task's name of every parameter, by identity."""
    return {id(parameter): name for name, parameter in task.named_parameters()}


def _labels(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """A name for each parameter in the order in which the optimizer numbers them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(id(p), f"(parameter {i})") for i, p in enumerate(parameters)]


def _named_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """`optimizer.state_dict()` with names in place of numbers: whoever reads it need not count."""
    plain, labels = optimizer.state_dict(), _labels(optimizer, names)
    return {
        **plain,
        "state": {labels[key] if isinstance(key, int) else key: value for key, value in plain["state"].items()},
        "param_groups": [{**group, "params": [labels[i] for i in group["params"]]} for group in plain["param_groups"]],
    }


def _load_named_state(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
    labels = _labels(optimizer, names)
    number = {label: i for i, label in enumerate(labels)}
    start, groups = 0, []
    for i, group in enumerate(optimizer.param_groups):
        now = labels[start : (start := start + len(group["params"]))]
        then = saved["param_groups"][i]["params"] if i < len(saved["param_groups"]) else []
        if now != then:
            odd = next((name for name in [*now, *then] if (name in now) != (name in then)), "their order")
            raise CheckpointError(
                f"{type(optimizer).__name__}: parameter group {i} is not the checkpoint's; it differs in {odd}. "
                "Build the optimizer as it was, or start a new run from the weights alone."
            )
        groups.append({**saved["param_groups"][i], "params": [number[name] for name in now]})
    if len(saved["param_groups"]) > len(groups):
        raise CheckpointError(f"{type(optimizer).__name__} had {len(saved['param_groups'])} parameter groups.")
    state = {number.get(key, key): value for key, value in saved["state"].items()}
    optimizer.load_state_dict({**saved, "state": state, "param_groups": groups})
    _keep_precision(optimizer, state)


def _keep_precision(optimizer: Optimizer, saved: Mapping[Any, Any]) -> None:
    """torch casts loaded state to its parameter's type; what was kept in a finer one is put back as it was."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, parameter in enumerate(parameters):
        for key, value in (saved.get(i) or {}).items():
            loaded = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _for_this_length(schedule: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """OneCycleLR keeps the length of its run in its state; a run that has grown keeps its own."""
    kept = dict(saved)
    if isinstance(schedule, OneCycleLR):
        kept |= {"total_steps": schedule.total_steps, "_schedule_phases": schedule._schedule_phases}
    return kept


def _entry(value: Any, where: str) -> Entry:
    if isinstance(value, Optimizer):
        return Entry(value)
    if isinstance(value, tuple) and len(value) in (2, 3) and isinstance(value[0], Optimizer):
        return Entry(value[0], [_schedule(value[1], value[2] if len(value) == 3 else None, value[0], where)])
    shown = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
    raise TaskError(f"{where} returned {shown}. {HOW_TO_RETURN}")


def _schedule(schedule: Any, when: Any, optimizer: Optimizer, where: str) -> Schedule:
    if not isinstance(schedule, (LRScheduler, ReduceLROnPlateau)) and not callable(getattr(schedule, "step", None)):
        raise TaskError(f"{where} returned {type(schedule).__name__} where a schedule belongs. {HOW_TO_RETURN}")
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise TaskError(f"{where}: the {type(schedule).__name__} drives another optimizer than the one beside it.")
    if isinstance(schedule, ReduceLROnPlateau):
        return Schedule(schedule, monitor=str(when or "val/loss"))
    return Schedule(schedule, every=None if when is None else Interval(when))
