"""Optimizers: the result of `configure_optimizers` by name, with schedules.

One optimizer has the name None. A dict, even of one, gives names: the Trainer then fires `forge_train_step` once per
name, and passes it to `training_step`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forge.errors import TaskError
from forge.optim import state as optimizer_state
from forge.optim.direct_adam import DirectAdam
from forge.optim.schedule_stepping import HOW_TO_RETURN, ScheduledLR, scheduled
from forge.progress import Position


@dataclass(slots=True)
class OptimizerEntry:
    """One optimizer, the schedules that drive it, and the parameters it owns."""

    optimizer: Optimizer
    schedules: list[ScheduledLR] = field(default_factory=list)
    needs_closure: bool = field(init=False)
    has_modes: bool = field(init=False)
    "Whether it evaluates other weights than it trains: a schedule-free optimizer, with `train()` and `eval()`."
    given: optimizer_state.Options = field(init=False)
    "The options of its groups as the run began."
    direct: DirectAdam | None = field(init=False)
    "A cheaper way to the same step, where torch's own Adam or AdamW is not watched."
    trial: Any = field(init=False)
    "A copy of the new optimizer, where a restore has to be tried: see `optim.state.rehearse`."
    rehearsals: int = 0

    def __post_init__(self) -> None:
        step = getattr(type(self.optimizer), "step", self.optimizer.step)  # a wrapper may delegate by __getattr__
        closure = inspect.signature(step).parameters.get("closure")
        self.needs_closure = closure is not None and (
            closure.default is closure.empty or optimizer_state.fails_without_closure(self.optimizer)
        )
        self.has_modes = all(callable(getattr(self.optimizer, mode, None)) for mode in ("train", "eval"))
        if self.has_modes:
            self.optimizer.train()  # pyright: ignore[reportAttributeAccessIssue]
        self.direct = DirectAdam.of(self.optimizer)
        self.given = [_options(group) for group in self.optimizer.param_groups]
        self.trial = optimizer_state.unused_copy(self.optimizer)

    def step(self) -> None:
        """Step the optimizer once."""
        if self.direct is None or self.direct.optimizer is not self.optimizer or not self.direct.step():
            self.optimizer.step()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The optimizer's current parameters; groups may be added during a run."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]


class Optimizers(Mapping[str | None, Optimizer]):
    """The optimizers of a run by name; `named` if the task returned a dict."""

    def __init__(self, entries: Mapping[str | None, OptimizerEntry]):
        self.entries = dict(entries)
        self.named = None not in self.entries
        self.has_schedules = any(entry.schedules for entry in self.entries.values())
        self._used: list[list[Any]] | dict[str, float] | None = None
        self.kept: list[optimizer_state.KeptOption] = []
        "Options of the checkpoint that differ from the code's: the run continues with the checkpoint's."
        self.evaluates = False
        "Whether optimizers with modes are set to `eval()`."
        self.orphans: list[nn.Parameter] = []
        "Trainable parameters in no optimizer: their gradients are dropped after every window."

    @classmethod
    def from_task(cls, returned: Any, task: nn.Module) -> Optimizers:
        """Parse the result of `configure_optimizers`; raise TaskError with what to return otherwise."""
        where = f"{type(task).__name__}.configure_optimizers"
        if isinstance(returned, Mapping):
            if "optimizer" in returned and "lr_scheduler" in returned:
                raise TaskError(f"{where} returned Lightning's dict. Return (optimizer, schedule) instead.")
            if not returned or not all(isinstance(name, str) and name for name in returned):
                raise TaskError(f"{where} returned a dict without names. {HOW_TO_RETURN}")
            return cls({name: _entry(value, f"{where}[{name!r}]") for name, value in returned.items()})
        return cls({None: _entry(returned, where)})

    def add_schedule(self, name: str | None, schedule: ScheduledLR) -> None:
        """Add a schedule to an optimizer, beside those of the task."""
        self.entries[name].schedules.append(schedule)
        self.has_schedules = True

    def advance(self, updated: bool, names: Collection[str], position: Position) -> None:
        """Step every schedule that is due and whose optimizer has stepped since: one if `updated`, of several those in
        `names`."""
        self._used = self._rates()
        for name, entry in self.entries.items():
            for item in entry.schedules:
                item.advance(updated and (name is None or name in names), position)

    def after_validation(self, metrics: Mapping[str, Any]) -> None:
        """Step the schedules that watch a metric."""
        for entry in self.entries.values():
            for item in entry.schedules:
                item.after_validation(metrics)

    def learning_rates(self) -> dict[str, float]:
        """Return the rates as `lr` or `lr/<name>`, with `/<group name>` or `/0`, `/1`, ... if groups differ."""
        return self._by_name(self._rates())

    @property
    def rates_used(self) -> dict[str, float] | None:
        """The learning rates of the last update, before schedules stepped."""
        return self._by_name(self._used) if isinstance(self._used, list) else self._used

    @rates_used.setter
    def rates_used(self, rates: dict[str, float] | None) -> None:
        self._used = rates

    def _rates(self) -> list[list[Any]]:
        """Return the rate of every parameter group, without reading a device: it is called at every update."""
        groups = [entry.optimizer.param_groups for entry in self.entries.values()]
        return [[rate.clone() if isinstance(rate := g.get("lr"), Tensor) else rate for g in each] for each in groups]

    def _by_name(self, rates: list[list[Any]]) -> dict[str, float]:
        named: dict[str, float] = {}
        for (name, entry), values in zip(self.entries.items(), rates, strict=True):
            key = "lr" if name is None else f"lr/{name}"
            labels = _labels(entry.optimizer)
            numbers = {labels[i]: float(value) for i, value in enumerate(values) if value is not None}
            if len(set(numbers.values())) > 1:
                named |= {f"{key}/{label}": value for label, value in numbers.items()}
            elif numbers:
                named[key] = next(iter(numbers.values()))
        return named

    @contextmanager
    def only(self, name: str | None) -> Iterator[None]:
        """Train one optimizer's parameters: turn `requires_grad` off for all others meanwhile."""
        own = {id(p) for p in self.entries[name].parameters}
        others = {id(p): p for entry in self.entries.values() for p in entry.parameters if id(p) not in own}
        frozen = [p for p in others.values() if p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    @contextmanager
    def evaluating(self) -> Iterator[list[nn.Parameter]]:
        """Set optimizers with modes to `eval()`, and back to `train()` with exactly the weights that they had, as their
        own way back rounds. Yield the parameters that have other values meanwhile."""
        entries = [] if self.evaluates else [entry for entry in self.entries.values() if entry.has_modes]
        moved = [p for entry in entries for p in entry.parameters]
        trained = [p.detach().clone() for p in moved]
        try:
            self.evaluates |= bool(entries)
            _set_mode(entries, "eval")
            yield moved
        finally:
            _set_mode(entries, "train")
            self.evaluates &= not entries
            with torch.no_grad():
                for parameter, kept in zip(moved, trained, strict=True):
                    parameter.copy_(kept)

    def finish(self) -> None:
        """Leave the task with the weights for evaluation, at the end of a run."""
        _set_mode([entry for entry in self.entries.values() if entry.has_modes], "eval")

    def parameters(self, name: str | None) -> list[nn.Parameter]:
        """Return the parameters of one optimizer, or of all for the name None."""
        if name in self.entries:
            return self.entries[name].parameters
        seen = {id(p): p for entry in self.entries.values() for p in entry.parameters}
        return list(seen.values())

    def state_dict(self, task: nn.Module) -> dict[str, Any]:
        """Return optimizer and schedule states by name, with the task's parameter names."""
        return optimizer_state.save(self, task)

    def refuse_others(self, state: Mapping[str, Any], task: nn.Module, where: str) -> None:
        """Raise CheckpointError for a state of other optimizers or schedules."""
        optimizer_state.refuse_others(self, state, task, where)

    def load_state_dict(self, state: Mapping[str, Any], task: nn.Module) -> None:
        """Restore a `state_dict`."""
        optimizer_state.load(self, state, task)

    def __getitem__(self, name: str | None) -> Optimizer:
        return self.entries[name].optimizer

    def __iter__(self) -> Iterator[str | None]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _set_mode(entries: Iterable[OptimizerEntry], mode: str) -> None:
    for entry in entries:
        getattr(entry.optimizer, mode)()


def drop_gradients(optimizer: Optimizer) -> None:
    """Call `optimizer.zero_grad(set_to_none=True)` without the profiler range, which costs 30 µs."""
    if getattr(type(optimizer), "zero_grad", None) is not Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain options of a parameter group; a rate that is a tensor as a number."""
    plain = {key: float(value) if type(value) is Tensor and key == "lr" else value for key, value in group.items()}
    return {key: value for key, value in plain.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return type(value) in (bool, int, float, str) or (type(value) is tuple and all(map(_is_plain, value)))


def _labels(optimizer: Optimizer) -> list[str]:
    """Return the names of parameter groups if all have different ones, else their numbers."""
    names = [group.get("name") for group in optimizer.param_groups]
    is_named = all(isinstance(name, str) and name for name in names) and len(set(names)) == len(names)
    return [str(name) if is_named else str(i) for i, name in enumerate(names)]


def _is_optimizer(value: Any) -> bool:
    """Whether this is torch's Optimizer, or an object with its methods, as some wrapping optimizers are."""
    methods = ("step", "zero_grad", "state_dict", "load_state_dict")
    is_alike = hasattr(value, "param_groups") and all(callable(getattr(value, name, None)) for name in methods)
    return isinstance(value, Optimizer) or is_alike


def _entry(value: Any, where: str) -> OptimizerEntry:
    if _is_optimizer(value):
        return OptimizerEntry(value)
    if isinstance(value, tuple) and len(value) in (2, 3) and _is_optimizer(value[0]):
        return OptimizerEntry(value[0], [scheduled(value[1], value[2] if len(value) == 3 else None, value[0], where)])
    shown = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
    raise TaskError(f"{where} returned {shown}. {HOW_TO_RETURN}")
