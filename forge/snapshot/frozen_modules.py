"""Frozen modules in a checkpoint: by name and hash, with those of their tensors that have changed since the run began.

A run builds them again by the task's constructor, so nothing of them is saved that is still as it was built.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from forge.checkpoint import sharding
from forge.checkpoint.hashing import new_hash, tensor_pieces
from forge.contract.run import Run
from forge.errors import CheckpointError
from forge.torch_internals import writes
from forge.util.frozen import Base, Frozen, kept_by_hash
from forge.util.text import few

logger = logging.getLogger("forge")

CHANGED = 0
"""In place of a tensor's id: it has changed, and is not hashed again."""

_begun: WeakKeyDictionary[Frozen | Base, dict[str, tuple[int, int, str]]] = WeakKeyDictionary()
"""What tensors were when the run began: id, version and digest by name."""


def begin(task: nn.Module) -> None:
    """Note what this run begins with. On several ranks all call this: what is divided is gathered, one at a time."""
    for held in kept_by_hash(task).values():
        _begun.pop(held, None)
        _known(held)


def described(task: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the hash of every frozen module as the run began with it, and the file of its weights, by path."""
    return {path: _described(held) for path, held in kept_by_hash(task).items()}


def states(trainer: Run) -> dict[str, Any]:
    """Return what a checkpoint holds of the frozen modules; log once which of them change."""
    found = {path: _described(held) | {"changed": changed(held)} for path, held in kept_by_hash(trainer.task).items()}
    for path, state in found.items():
        if state["changed"] and f"frozen {path}" not in trainer.said and trainer.env.is_main:
            trainer.said.add(f"frozen {path}")
            text = "The frozen module %r changes while the run trains: %s. Checkpoints hold what has changed. If it is "
            text += "to be trained, make it a part of the task: without forge.frozen."
            logger.info(text, path, few(state["changed"]))
    return found


def changed(held: Frozen | Base) -> dict[str, Tensor]:
    """Return the tensors that differ from those that the run began with, by name.

    A parameter that nobody wrote to is not read. A buffer is: kernels write BatchNorm's statistics without a trace.
    """
    known, found = _known(held), dict[str, Tensor]()
    for name, tensor in held.tensors().items():
        if sharding.is_distributed(tensor) and not tensor.requires_grad:
            continue  # divided over ranks, and nobody trains it
        address, version, digest = known.get(name, (CHANGED, 0, ""))
        if isinstance(tensor, nn.Parameter) and (id(tensor), writes(tensor)) == (address, version):
            continue
        if address != CHANGED and digest == _digest(tensor):  # written to, with the same values
            known[name] = (id(tensor), writes(tensor), digest)
            continue
        known[name] = (CHANGED, 0, digest)
        found[name] = tensor.detach()
    return found


def restore(trainer: Run, saved: Mapping[str, Any], where: str) -> None:
    """Put back what had changed. What has changed since, in a run that goes back, cannot be: it is said."""
    for path, held in kept_by_hash(trainer.task).items():
        lost = [name for name in changed(held) if name not in saved.get(path, {}).get("changed", {})]
        if lost:
            text = "%s: the frozen module %r has changed since (%s), and keeps the values that it has now."
            logger.warning(text, where, path, ", ".join(lost[:3]))
    put_back(trainer.task, saved)


def put_back(task: nn.Module, saved: Mapping[str, Any]) -> None:
    """Put back what had changed when a checkpoint was made."""
    for path, held in kept_by_hash(task).items():
        if values := saved.get(path, {}).get("changed"):
            held.put_back(dict(values))


def refuse_others(trainer: Run, saved: Mapping[str, Any], where: str) -> None:
    """Refuse, by name, to continue with frozen modules that have other weights than when the run began."""
    odd = differences(trainer.task, saved)
    if not odd:
        return
    if trainer.allow_inexact:
        logger.warning("%s: %s. The resumed run will differ (allow_inexact).", where, odd)
        return
    raise CheckpointError(
        f"{where} cannot be continued: {odd}. A frozen module is in no checkpoint; the task builds it again. Give it "
        "the same weights, from a file (forge.frozen(module, file=...)) or after forge.seed(...). Or start a new run, "
        "or set allow_inexact=True (trainer.allow_inexact=true on the command line)."
    )


def differences(task: nn.Module, saved: Mapping[str, Any]) -> str:
    """Say which frozen modules of a task are not those that a run began with."""
    now = described(task)
    odd = [f"the frozen module {path!r} is not in this task" for path in saved if path not in now]
    odd += [f"the frozen module {path!r} is new" for path in now if path not in saved]
    for path, state in saved.items():
        if path in now and state.get("sha256") != now[path]["sha256"]:
            file = now[path].get("file", state.get("file"))
            odd.append(f"the frozen module {path!r} has other weights than when the run began{_of(file)}")
    return "; ".join(odd)


def _of(file: str | None) -> str:
    return f" (its file: {file})" if file else ""


def _described(held: Frozen | Base) -> dict[str, Any]:
    whole = new_hash()
    for name, (_, _, digest) in sorted(_known(held).items()):
        whole.update(f"{name} {digest}\n".encode())
    file = {} if held.source is None else {"file": held.source.file, "file_sha256": held.source.sha256}
    title = {"name": held.title} if isinstance(held, Base) and held.title else {}
    return {"sha256": whole.hexdigest(), **file, **title}


def _known(held: Frozen | Base) -> dict[str, tuple[int, int, str]]:
    if held not in _begun:
        now = held.tensors().items()
        _begun[held] = {name: (id(tensor), writes(tensor), _digest(tensor)) for name, tensor in now}
    return _begun[held]


def _digest(tensor: Tensor) -> str:
    summary = new_hash()
    for piece in tensor_pieces(sharding.whole(tensor) if sharding.is_distributed(tensor) else tensor):
        summary.update(piece)
    return summary.hexdigest()
