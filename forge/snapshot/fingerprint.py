"""Compare a run with a checkpoint: differences that forbid resuming, and those that deserve a warning."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from forge.checkpoint.weights import EXTRA_STATE
from forge.contract.run import Run
from forge.errors import CheckpointError
from forge.util.text import few
from forge.version import __version__

WORDS = {
    "seed": "the seed",
    "window": "the number of micro-batches in a window",
    "data.samples": "the length of the data",
    "data.batches": "the number of batches in an epoch",
    "data.batch_size": "the global batch size",
    "data.seed": "the seed of the data's order",
    "data.order": "the order of the data",
}


def fingerprint(trainer: Run) -> dict[str, Any]:
    """Return what determines a run besides its state. The model's shapes are compared tensor by tensor."""
    return {"seed": trainer.seed, "window": trainer.window, "data": trainer.feed.fingerprint()}


def surroundings(trainer: Run) -> dict[str, Any]:
    """Return what may change between two attempts of a run, and can change the last bits."""
    return {
        "forge": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": trainer.env.device.type,
        "threads": torch.get_num_threads(),
        "ranks": trainer.env.world,
        "deterministic": trainer.deterministic,
    }


def refuse_another_run(saved: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Raise, naming every field, if a checkpoint belongs to a different run."""
    odd = [f"{WORDS.get(path, path)} was {then!r} and is {this!r}" for path, then, this in differences(saved, now)]
    if odd:
        raise CheckpointError(
            f"{where} cannot be continued: {'; '.join(odd)}. Restore the old value, or start a new run "
            "(from these weights: --weights, or fit(..., weights=...))."
        )


def refuse_another_model(saved: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Raise, naming tensors, if names or shapes of the checkpoint's model differ."""
    odd = [f"{name} is not in the checkpoint" for name in now if name not in saved]
    odd += [f"{name} is only in the checkpoint" for name in saved if name not in now]
    odd += [
        f"{name} was {_shape(saved[name])} and is {_shape(now[name])}"
        for name in now
        if name in saved
        and not name.endswith(EXTRA_STATE)
        and not is_lazy(now[name])  # takes the shape of what is loaded
        and _shape(saved[name]) != _shape(now[name])
    ]
    if odd:
        raise CheckpointError(
            f"{where} holds another model: {few(odd, between='; ')}. Give the task its former options, or start a "
            "new run."
        )


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{' × '.join(map(str, value.shape)) or 'a scalar'} {str(value.dtype).removeprefix('torch.')}"


def differences(then: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, then, now) of every value that differs in two nested mappings."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in [*then, *(key for key in now if key not in then)]:
            yield from differences(then.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif then != now:
        yield path, then, now
