"""Open a run or an exported file as an engine, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from forge import registry
from forge.checkpoint.weights import split_best
from forge.contract.task import TaskModule
from forge.errors import ForgeError
from forge.runs.trained_task import find
from forge_ship import card
from forge_ship.engine import Engine, ExportError, Port, check_inputs
from forge_ship.export import loader_of, prepare
from forge_ship.export_formats import module_of
from forge_ship.interface import Deployed
from forge_ship.operators import import_libraries
from forge_ship.structure import flat
from forge_ship.verify import run

BATCHES = 2
"""Validation batches that tell what a run's task takes."""


class ModuleEngine:
    """A module as an engine, in this process."""

    def __init__(self, module: Callable[..., Any], inputs: Sequence[Port], outputs: Sequence[Port], device: str):
        self.inputs, self.outputs, self._module, self._device = inputs, outputs, module, device

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = run(self._module, inputs, self._device)
        return {port.name: tensor.cpu() for port, tensor in zip(self.outputs, found, strict=True)}


class FileEngine:
    """An exported file as an engine. Inputs are checked here: not every runtime does."""

    def __init__(
        self,
        run: Callable[[list[Tensor]], Any],
        inputs: Sequence[Port],
        outputs: Sequence[Port],
        device: str,
        format: str,
    ):
        self.inputs, self.outputs, self.format = inputs, outputs, format
        self._run, self._device = run, device

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_inputs(inputs, self.inputs)
        found = flat(self._run([inputs[port.name].to(self._device) for port in self.inputs]))
        return {port.name: tensor.cpu() for port, tensor in zip(self.outputs, found, strict=True)}


def open_engine(
    path: str | Path,
    *,
    device: str = "cpu",
    task: Callable[..., TaskModule] | None = None,
    weights: str | None = None,
    data: Any = None,
) -> Engine:
    """Open a run folder, a checkpoint in one (`RUN:best`), or a file that `forge export` wrote."""
    path, weights = split_best(path, weights)
    if not path.exists():
        raise ExportError(f"There is nothing at {path}: give a run folder or a file of `forge export`.")
    if path.is_file() and path.suffix not in (".safetensors", ".pt"):
        return open_file(path, device)
    if path.is_dir() and any(map(card.is_card, path.iterdir())):
        return open_file(_only_file(path), device)
    source = find(path, task, weights)
    source.task.to(device)
    prepared = prepare(source, loader_of(source, data), device, batches=BATCHES)
    return ModuleEngine(Deployed(source.task, prepared.interface).eval(), *prepared.ports(), device)


def open_file(file: Path, device: str = "cpu") -> FileEngine:
    """Open an exported file, once its hash is found to be that of its card."""
    read = card.CheckedCard(file)
    module = module_of(read.format)
    if getattr(module, "WEIGHTS_ONLY", False):
        raise ExportError(f"{file} holds weights alone, no program. Export to pt2 or onnx, or name the run folder.")
    read.check_hash()
    names = [port.name for port in read.inputs]
    try:
        import_libraries(read.libraries)
        with registry.blamed("format", read.format, f"open {file.name}"):
            run = module.open_file(file, names, device)
    except Exception as error:
        why = str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
        raise ExportError(f"{file} cannot be loaded: {why}") from error
    return FileEngine(run, read.inputs, read.outputs, device, read.format)


def _only_file(folder: Path) -> Path:
    files = [path for path in folder.iterdir() if path.is_file() and not card.is_card(path)]
    if len(files) != 1:
        raise ExportError(f"{folder} has {len(files)} exported files; name the one to use.")
    return files[0]
