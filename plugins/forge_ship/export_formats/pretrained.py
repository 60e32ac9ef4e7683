"""pretrained: a folder that `from_pretrained` of transformers loads, by the model's own `save_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from forge_ship.engine import ExportError
from forge_ship.export_formats.plan import Plan
from forge_ship.export_formats.safetensors import task_in

ABOUT = "a folder of transformers' save_pretrained, with the tokenizer"
PACKAGES = ("transformers",)
EXTRA = "forge-trainer[hf]"
FILE = "pretrained"
TOLERANCE = 0.0
WEIGHTS_ONLY = True
PLACE = "forge.json"
"""Says under which name the task has the model: its weights are compared by name."""


def write(plan: Plan, path: Path) -> None:
    task = task_in(plan.model)
    name, model = model_of(task)
    model.save_pretrained(path)
    for part in vars(task).values():  # a tokenizer or a processor is no module
        if hasattr(part, "save_pretrained") and not isinstance(part, nn.Module):
            part.save_pretrained(path)
    (path / PLACE).write_text(json.dumps({"module": name}) + "\n", encoding="utf-8")


def model_of(task: nn.Module) -> tuple[str, Any]:
    """Return the task's only model of transformers, with its name; refuse a task that has other weights besides."""
    found: dict[str, Any] = {}
    for name, module in task.named_modules():
        if hasattr(module, "save_pretrained") and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    title = type(task).__name__
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise ExportError(f"--to pretrained takes a task with one model of transformers; {title} has: {names}.")
    ((name, model),) = found.items()
    if hasattr(model, "peft_config"):
        raise ExportError(
            f"--to pretrained: {title}.{name} has adapters of PEFT. Save these with "
            f"forge.load(RUN).{name}.save_pretrained(FOLDER), or merge them: task.{name} = "
            f"task.{name}.merge_and_unload(), then forge.export(task, ...)."
        )
    others = [weight for weight, _ in task.named_parameters() if not weight.startswith(f"{name}.")]
    if others:
        raise ExportError(
            f"--to pretrained: {title} has weights beside {name}, which would be lost: {', '.join(others[:4])}. "
            "Use --to safetensors."
        )
    return name, model


def read_file(path: Path) -> dict[str, Tensor]:
    """Load the folder as a user does, and name the weights as the task names them."""
    import transformers

    (kind,) = json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"]
    made: Any = getattr(transformers, kind).from_pretrained(path)
    name = json.loads((path / PLACE).read_text(encoding="utf-8"))["module"]
    return {f"{name}.{key}": tensor for key, tensor in made.state_dict().items()}
