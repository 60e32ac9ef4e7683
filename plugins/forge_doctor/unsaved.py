"""State that changes and that no `state_dict` holds: what the doctor warns of after a few updates."""

from __future__ import annotations

import functools
import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forge.checkpoint.tensors import as_bytes
from forge.contract.run import Run
from forge.snapshot.hidden import roots
from forge.util.walk import is_librarys, walk

MAX_BYTES = 2**16
"""Of a larger array a part is compared; of a larger tensor, or one on an accelerator, only whether it was written."""
EPOCH = re.compile(r"(loader|sampler)\._?(epoch|start)$")
"""Attributes that `set_epoch` and `seek` of a loader or sampler set, also on resume."""


def fingerprint_hidden(trainer: Run) -> dict[str, str]:
    """Return a digest of every plain value, by path, that a resumed run would not have."""
    left_out = tuple(saved_attributes(trainer.task))
    found = fingerprints(roots(trainer), saved_tensors(trainer.task), _tensor_digest, _array_digest)
    return {path: value for path, value in found if not path.startswith(left_out) and not EPOCH.search(path)}


def fingerprints(
    roots: Mapping[str, Any], known: Set[int], of_tensor: Callable[[Any], str], of_array: Callable[[Any], str]
) -> Iterator[tuple[str, str]]:
    """Yield (path, digest) of every plain value inside objects; `known` are tensors to leave out."""
    for path, value in walk(roots, _is_looked_into):
        if isinstance(value, Tensor):
            is_made = value.grad_fn is not None or value.is_inference()  # by the last forward
            if id(value) not in known and not isinstance(value, nn.Parameter) and not is_made:
                yield path, of_tensor(value)
        elif isinstance(value, np.ndarray):
            yield path, of_array(value)
        elif isinstance(value, (set, frozenset)):
            yield path, repr(sorted(map(repr, value)))[:4096]
        elif isinstance(value, (list, dict, deque)):
            yield path, f"{len(value)} items"
        elif isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
            yield path, repr(value)[:4096]


def _is_looked_into(path: str, value: Any) -> bool:
    """Whether values inside can matter: the transforms of packages note there what they have just drawn."""
    is_data = type(value).__module__.startswith("torch.utils.data")
    return isinstance(value, nn.Module) or is_data or path.startswith("task") or not is_librarys(value)


def saved_tensors(task: nn.Module) -> set[int]:
    """Return the ids of the tensors that the task's `state_dict` holds."""
    return {id(value) for value in task.state_dict(keep_vars=True).values() if isinstance(value, Tensor)}


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


def _tensor_digest(value: Tensor) -> str:
    shape = f"{value.dtype} {tuple(value.shape)}"
    if not value.is_cpu or value.nbytes > MAX_BYTES or type(value) is not Tensor or value.layout is not torch.strided:
        return f"{shape} {id(value)} {0 if value.is_inference() else value._version}"
    data = as_bytes(value.detach().resolve_conj().resolve_neg().contiguous())
    return f"{shape} {hashlib.sha256(data).hexdigest()[:16]}"


def _array_digest(value: np.ndarray) -> str:
    part = (
        value.ravel()[:: max(1, value.nbytes // MAX_BYTES)]
        if value.flags.c_contiguous
        else value.flat[: MAX_BYTES // 8]
    )
    data = repr(part[:1000].tolist()).encode() if value.dtype.hasobject else np.ascontiguousarray(part).tobytes()
    return f"{value.dtype} {value.shape} {hashlib.sha256(data).hexdigest()[:16]}"


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
