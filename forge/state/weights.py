"""Weights as one safetensors file with the task's own names; tied weights are stored once."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forge.errors import TaskError

EXTRA_STATE = "_extra_state"
"""What torch calls the state of a module that is no tensor; a weights file has no place for it."""


def save_weights(task: nn.Module, path: Path) -> None:
    """Write parameters and buffers beside `path`, then rename, so that the name never holds a torn file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(_tensors(task), partial, metadata={"format": "pt"})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_weights(task: nn.Module, path: str | Path) -> None:
    """Load a weights file into the task; names and shapes must match. A run folder stands for its weights file."""
    file = Path(path)
    if file.is_dir():
        file = file / "weights.safetensors"
    if not file.is_file():
        raise TaskError(f"There is no weights file at {file}. fit writes RUN/weights.safetensors at its end.")
    try:
        weights = load_file(file)
        missing, unexpected = task.load_state_dict(weights, strict=False)
    except Exception as error:
        raise TaskError(f"{file} does not fit {type(task).__name__}: {error}") from error
    missing = _really_missing(task, missing, weights)
    if missing or unexpected:
        parts = [f"it lacks {', '.join(missing[:5])}"] if missing else []
        parts += [f"it has {', '.join(unexpected[:5])} beside what the task has"] if unexpected else []
        raise TaskError(f"{file} does not fit {type(task).__name__}: {'; '.join(parts)}.")


def _tensors(task: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the state once, each with memory of its own."""
    kept: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, value in task.state_dict().items():
        if not isinstance(value, Tensor):
            module = name.removesuffix(f".{EXTRA_STATE}")
            warnings.warn(f"weights.safetensors leaves out the extra state of {module}: it is no tensor.", stacklevel=2)
            continue
        place = (value.data_ptr(), tuple(value.shape), tuple(value.stride()))
        if value.numel() and place in seen:  # tied: loading the first fills them all
            continue
        seen.add(place)
        whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
        kept[name] = value if whole else value.clone().contiguous()
    return kept


def _really_missing(task: nn.Module, missing: list[str], loaded: dict[str, Tensor]) -> list[str]:
    """Names that nothing filled: neither extra state nor tied to a weight that was loaded."""
    state = task.state_dict()
    filled = {state[name].data_ptr() for name in loaded if name in state}
    return [
        name
        for name in missing
        if not name.endswith(EXTRA_STATE) and not (isinstance(state[name], Tensor) and state[name].data_ptr() in filled)
    ]
