"""State that no `state_dict` holds: generators in a user's objects are saved and restored; what else changes is named.

The task, the functions of its schedules, and the data that are made in this process are looked at when a run begins and
when its state is captured, never in between.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from forge.checkpoint.tensors import as_bytes
from forge.data.accumulation_windows import Feed, has_state, is_stateful
from forge.data.own_generators import copied_roots, data_roots
from forge.util.generators import find_generators, generator_state, set_generator_state
from forge.util.walk import is_librarys, walk

if TYPE_CHECKING:
    from forge.contract.run import Run

logger = logging.getLogger("forge")

HIDDEN = "hidden"
"""The key of the generators' states, beside those of the global ones."""

MAX_BYTES = 2**16
"""Of a larger array a part is compared; of a larger tensor, or one on an accelerator, only whether it was written."""

TASK_CURE = (
    "If the training depends on it, make it a buffer (self.register_buffer), or save it with get_extra_state and "
    "set_extra_state"
)
SCHEDULE_CURE = "Compute the rate from the step that the function is given"
EPOCH = re.compile(r"(loader|sampler)\._?(epoch|start)$")
"""Attributes that `set_epoch` and `seek` of a loader or sampler set, also on resume."""
DATA_CURE = "A cache of values that stay the same does no harm; compute anything else from the index"


# -- generators -------------------------------------------------------------------------------------------------------


def generator_states(trainer: Run) -> dict[str, Any]:
    """Return {"hidden": states by path} of the generators in the task, its optimizers and the data; {} if none."""
    found = {path: generator_state(generator) for path, generator in find_generators(_roots(trainer)).items()}
    drawn = trainer.feed.generator_states()
    states = found | {path: state for path, state in drawn.items() if path in found}
    return {HIDDEN: states} if states else {}


def restore_generators(trainer: Run, saved: Mapping[str, Any]) -> None:
    """Restore the generators by path; warn of those that are only in the checkpoint, or only in this run."""
    states: Mapping[str, Any] = saved.get(HIDDEN, {})
    found = find_generators(_roots(trainer))
    lost = [p for p, state in states.items() if p not in found or not set_generator_state(found[p], state)]
    new = [path for path in found if path not in states]
    if lost:
        logger.warning(
            "The checkpoint has the state of %s, which this run does not have (yet): create the generator before fit, "
            "with the same transforms and number of workers, or the run differs from here on.",
            _listed(lost),
        )
    if new:
        text = "The checkpoint has no state of %s: it starts from its first state, so the run may differ."
        logger.warning(text, _listed(new))


def _roots(trainer: Run) -> dict[str, Any]:
    roots: dict[str, Any] = {"task": trainer.task}
    for name, entry in trainer.optimizers.entries.items():
        label = "optimizer" if name is None else f"optimizer {name!r}"
        roots |= {label: vars(entry.optimizer), **_schedules(entry.schedules, label)}
    return roots | _data(trainer)


def _schedules(schedules: Iterable[Any], label: str) -> dict[str, Any]:
    """Return the functions of schedules, whose closures torch does not save."""
    functions = {f"{label}'s schedule {i}": _functions(item.schedule) for i, item in enumerate(schedules)}
    return {name: found for name, found in functions.items() if found}


def _functions(schedule: Any) -> list[Any]:
    given = [*getattr(schedule, "lr_lambdas", ()), *(_functions(s) for s in getattr(schedule, "_schedulers", ()))]
    return [function for function in given if isinstance(function, list) or hasattr(function, "__code__")]


def _data(trainer: Run, copied: bool = False, held: bool = True) -> dict[str, Any]:
    """Return the objects that make samples, by name; unless `held`, without datasets whose state their loader has."""
    given = {"train": trainer.feed.loader}
    for stage, loaders in trainer.loaders.items():
        for name, loader in loaders.items() if stage != "train" else ():
            given[stage if name is None else f"{stage}/{name}"] = loader
    roots: dict[str, Any] = {}
    for stage, loader in given.items():
        found = data_roots(loader, stage, copied)
        by_state = not held and is_stateful(loader) and not hasattr(loader, "seek")
        roots |= {name: value for name, value in found.items() if not (by_state and has_state(value))}
    return roots


# -- everything else --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Watch:
    """The values of a run's hidden state as it began."""

    first: dict[str, str]
    named: set[str] = field(default_factory=set)
    "What a warning has named."


_watches: WeakKeyDictionary[Feed, Watch] = WeakKeyDictionary()


def warn_of_changes(trainer: Run) -> None:
    """Warn, once each, of values that have changed since the run began and that no checkpoint holds."""
    now = fingerprint_hidden(trainer)
    watch = _watches.get(trainer.feed)
    if watch is None:
        _watches[trainer.feed] = Watch(now)
        _warn_of_copies(trainer)
        return
    paths = [path for path, value in watch.first.items() if now.get(path, value) != value]
    watch.first = now | watch.first  # what is made at its first use counts from then on
    changed = dict.fromkeys(_attribute(path) for path in paths if not is_a_librarys(trainer, path))
    fresh = [path for path in changed if path not in watch.named]
    watch.named.update(fresh)
    if fresh and trainer.env.is_main:
        _warn(fresh)


def _warn(paths: list[str]) -> None:
    logger.warning(
        "%s changes during training and is in no checkpoint: a resumed run begins with its first value. %s.",
        _listed(paths),
        ". ".join(dict.fromkeys(map(_cure, paths))),
        extra={"finding": "state_not_saved"},
    )


def _cure(path: str) -> str:
    if path.startswith("task"):
        return TASK_CURE
    return SCHEDULE_CURE if path.startswith("the optimizer") else DATA_CURE


def _warn_of_copies(trainer: Run) -> None:
    """Warn of generators that each worker of a loader copies, and that nothing saves or seeds."""
    found = find_generators(copied_roots(trainer.feed.loader))
    if found and trainer.env.is_main:
        logger.warning(
            "%s is copied into each worker of %s, which forge neither saves nor seeds: a resumed run differs. Pass a "
            "torch DataLoader or a forge.data.Loader, or set num_workers=0.",
            _listed(found),
            type(trainer.feed.loader).__name__,
        )


def fingerprint_hidden(trainer: Run) -> dict[str, str]:
    """Return a digest of every plain value, by path, that a resumed run would not have."""
    left_out = tuple(saved_attributes(trainer.task))
    found = fingerprints(value_roots(trainer), saved_tensors(trainer.task), _tensor_digest, _array_digest)
    return {path: value for path, value in found if not path.startswith(left_out) and not EPOCH.search(path)}


def value_roots(trainer: Run, copied: bool = False) -> dict[str, Any]:
    """Return the objects of a run that may hold values of the user's, by name; data that workers have `copied` too."""
    roots: dict[str, Any] = {"task": trainer.task}
    for entry in trainer.optimizers.entries.values():
        roots |= _schedules(entry.schedules, "the optimizer")
    return roots | _data(trainer, copied, held=False)


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


def _attribute(path: str) -> str:
    """Return the path of the attribute that holds a value inside lists and dicts."""
    return path.partition("[")[0] if not path.startswith("the optimizer") else path


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


def _listed(paths: Iterable[str]) -> str:
    paths = list(paths)
    return f"{', '.join(paths[:4])}{f' and {len(paths) - 4} more' if len(paths) > 4 else ''}"
