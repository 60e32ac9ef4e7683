"""Weights as one safetensors file with the task's own names; tied weights are stored once."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import load_model, save_model
from torch import nn

from forge.errors import TaskError


def save_weights(task: nn.Module, path: Path) -> None:
    """Write parameters and buffers beside `path`, then rename, so that the name never holds a torn file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_model(task, str(partial), metadata={"format": "pt"})
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
        load_model(task, file, device="cpu")
    except Exception as error:
        raise TaskError(f"{file} does not fit {type(task).__name__}: {error}") from error
