"""`forge.frozen`: a module that a task uses and that is not the task's to train or save."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from forge.checkpoint.weights import fill, read_weights
from forge.errors import TaskError
from forge.util.frozen import BASE, Base, Frozen, WeightsFile, frozen_in

Module = TypeVar("Module", bound=nn.Module)


def frozen(module: Module, *, file: str | Path | None = None) -> Module:
    """Hold a module that a task uses, but does not train or save: a teacher, a reference, a feature extractor.

    ::

        self.teacher = forge.frozen(Teacher())
        self.teacher = forge.frozen(Teacher(), file="teacher.safetensors")

    Its parameters get no gradient. It is put into evaluation mode, and one that you put back with `.train()` stays
    there. It is no submodule of the task, so it is in no checkpoint, optimizer, average, parameter count, DDP or FSDP.
    Its device and dtype follow the task. A resumed run builds it again by the task's constructor; one with other
    weights than when the run began is refused.

    `file` holds its weights: safetensors, a file of torch.save that is read without running code, a run folder, or a
    checkpoint. Its hash is in the run card.

    What is returned passes calls and attributes on to the module; `.module` is the module itself.
    """
    if isinstance(module, Frozen):
        module = cast(Module, module.module)
    if not isinstance(module, nn.Module):
        raise TaskError(f"forge.frozen takes a torch module; this is a {type(module).__name__}.")
    source = None
    if file is not None:
        with torch.device("cpu"):  # a task that is built on the meta device must not read its teacher there
            found = read_weights(file)
            if any(parameter.is_meta for parameter in module.parameters()):
                module.to_empty(device="cpu")
            fill(module, found)
        source = WeightsFile(str(file), _sha256(Path(found.path)))
    return cast(Module, Frozen(module.requires_grad_(False).eval(), source))


def adapter(model: Module) -> Module:
    """Return a model of which only what it trains is the task's to save: adapters on a frozen base, as those of LoRA.

    ::

        self.model = forge.adapter(get_peft_model(base, LoraConfig(...)))

    Freeze the base first (peft does): what has `requires_grad=False` now, and every buffer, is left out of
    `state_dict()`, and so of checkpoints and weights files. It is noted by its hash. A resumed run builds it again by
    the task's constructor, and another base is refused. What of it changes nevertheless is saved.
    """
    if BASE not in vars(model):
        vars(model)[BASE] = Base(model)
    return model


def _sha256(path: Path) -> str:
    """Return the hash of a file; of a checkpoint, that of its manifest, which has the hashes of its files."""
    with (path / "manifest.json" if path.is_dir() else path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def refuse_without_values(task: nn.Module) -> None:
    """Refuse a frozen module on the meta device: nothing would ever fill it."""
    for name, held in frozen_in(task).items():
        if any(tensor.is_meta for tensor in held.tensors().values()):
            raise TaskError(
                f"The frozen module {name!r} of {type(task).__name__} was made on the meta device, so it has no "
                "weights. Give it a file, forge.frozen(module, file=...), or make it in `with torch.device('cpu'):`."
            )


def move_frozen(task: nn.Module, function: Any) -> None:
    """Do to the frozen modules of a task what `_apply` does to its own tensors."""
    for held in frozen_in(task).values():
        held.module._apply(function)
