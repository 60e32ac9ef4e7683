"""Write an optimizer's own `state_dict` as plain data with the task's parameter names, and read it again.

torch numbers parameters; wrapping optimizers have keys of other kinds: pairs of numbers, or the parameters themselves.
A dict with such keys is written as its items. Whatever else is in the state stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ITEMS = "(items)"
PARAMETER = "(parameter)"
DTYPE = "(dtype)"


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """The parameters of one optimizer in their order, with the task's names."""

    parameters: list[Any]
    labels: list[str]

    def write(self, value: Any) -> Any:
        """Return a state with names for parameters, as plain data."""
        if isinstance(value, dict):
            if self._is_torch_state(value):
                value = self._with_names(value)
            if all(type(key) in (str, int) for key in value):
                return {key: self.write(item) for key, item in value.items()}
            return {ITEMS: [(self._key(key), self.write(item)) for key, item in value.items()]}
        if isinstance(value, torch.dtype):
            return {DTYPE: str(value).removeprefix("torch.")}
        return type(value)(map(self.write, value)) if type(value) in (list, tuple) else value

    def read(self, value: Any) -> Any:
        """Return the state that `write` was given, for this optimizer's parameters."""
        if isinstance(value, dict):
            if value.keys() == {ITEMS}:
                return {self._key_again(key): self.read(item) for key, item in value[ITEMS]}
            if value.keys() == {DTYPE}:
                return getattr(torch, value[DTYPE])
            value = {key: self.read(item) for key, item in value.items()}
            return self._with_numbers(value) if _has_named_groups(value) else value
        return type(value)(map(self.read, value)) if type(value) in (list, tuple) else value

    def _is_torch_state(self, value: Mapping[Any, Any]) -> bool:
        """Whether this is the state of an optimizer over just these parameters, as torch writes it."""
        numbers = [number for group in _groups(value) for number in group["params"]]
        return bool(numbers) and numbers == list(range(len(self.labels)))

    def _with_names(self, value: Mapping[Any, Any]) -> dict[Any, Any]:
        labels = self.labels
        return {
            **value,
            "state": {labels[key] if isinstance(key, int) else key: item for key, item in value["state"].items()},
            "param_groups": [
                {**group, "params": [labels[i] for i in group["params"]]} for group in value["param_groups"]
            ],
        }

    def _with_numbers(self, value: Mapping[Any, Any]) -> dict[Any, Any]:
        number = {label: i for i, label in enumerate(self.labels)}
        return {
            **value,
            "state": {number.get(key, key): item for key, item in value["state"].items()},
            "param_groups": [
                {**group, "params": [number[name] for name in group["params"]]} for group in value["param_groups"]
            ],
        }

    def _key(self, key: Any) -> Any:
        if isinstance(key, Tensor):
            place = next((i for i, parameter in enumerate(self.parameters) if parameter is key), None)
            return key if place is None else {PARAMETER: self.labels[place]}
        return key

    def _key_again(self, key: Any) -> Any:
        return self.parameters[self.labels.index(key[PARAMETER])] if isinstance(key, dict) else key


def saved_groups(value: Any) -> list[Any]:
    """Return the parameter groups in a state, which a wrapping optimizer may have one level deeper; [] if none."""
    if not isinstance(value, dict):
        return []
    return _groups(value) or next(
        filter(None, (_groups(item) for item in value.values() if isinstance(item, dict))), []
    )


def _groups(value: Mapping[Any, Any]) -> list[Any]:
    groups = value.get("param_groups")
    if not isinstance(groups, list) or not isinstance(value.get("state"), dict):
        return []
    return groups if all(isinstance(group, dict) and "params" in group for group in groups) else []


def _has_named_groups(value: Mapping[Any, Any]) -> bool:
    return any(isinstance(name, str) for group in _groups(value) for name in group["params"])
