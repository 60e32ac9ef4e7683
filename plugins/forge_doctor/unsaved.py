"""State of the task that changes and that no `state_dict` holds: what the doctor warns of after a few updates."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from forge.contract.run import Run
from forge.snapshot.evidence import unsaved
from forge.util.walk import is_librarys
from forge_doctor.patient import Patient, copied_task, like, numbers


def fingerprint_hidden(trainer: Run) -> dict[str, str]:
    """Return a digest of every value of the task, by path, that no module saves itself."""
    left_out = tuple(saved_attributes(trainer.task))
    found = ((path, value) for path, value in unsaved(trainer) if path.startswith("task.") and " (" not in path)
    return {path: value for path, value in found if not path.startswith(left_out)}


def matters(patient: Patient) -> bool:
    """Whether a step says something else where the task has its first attributes, as in a run that is resumed."""
    if patient.original is None:
        return True
    used, resumed = patient.clone(), like(copied_task(patient.original).to(patient.device), patient.task)
    resumed.load_state_dict(used.state_dict())
    resumed.trainer = patient.trainer
    for stage, batches in patient.stages:
        for name in patient.names if stage == "train" else [None]:
            given = [copy.deepcopy(batches[0]) for _ in range(2)]
            said = [numbers(patient.run(task, x, stage, name)) for task, x in zip((used, resumed), given, strict=True)]
            if any(said[0][key] != said[1].get(key) for key in said[0] if said[0][key] == said[0][key]):
                return True
    return False


def saved_attributes(task: nn.Module) -> Iterator[str]:
    """Yield the paths of attributes of modules that save state of their own."""
    own = getattr(task, "forge_state_dict", None) is not None or _overrides(task, "on_save_checkpoint")
    for name, module in task.named_modules():
        hooked = module._state_dict_hooks or module._state_dict_pre_hooks or module._load_state_dict_pre_hooks
        methods = ("get_extra_state", "state_dict", "_save_to_state_dict")
        if (own and module is task) or hooked or any(_overrides(module, method) for method in methods):
            prefix = f"task.{name}" if name else "task"
            inner = module._modules.keys()
            yield from (f"{prefix}.{attribute}" for attribute in vars(module) if attribute not in inner)


def _overrides(module: nn.Module, method: str) -> bool:
    given = getattr(type(module), method, None)
    return given is not None and not str(getattr(given, "__module__", "")).startswith(("torch.nn", "lightning"))


def is_a_librarys(trainer: Run, path: str) -> bool:
    """Whether this is a private attribute of an object of an installed package, or tensors that its module keeps."""
    owner_path, private, _ = path.partition("._")
    root, *names = owner_path.partition("[")[0].split(".")
    last = None if private else names.pop() if names else None
    owner = functools.reduce(lambda owner, name: getattr(owner, name, owner), names, trainer.task)
    if root != "task" or not is_librarys(owner):
        return False
    return bool(private) or (last is not None and _holds_tensors(getattr(owner, last, None)))


def _holds_tensors(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return bool(items) and all(isinstance(item, Tensor) for item in items)
