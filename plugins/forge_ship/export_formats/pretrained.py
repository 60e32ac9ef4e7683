"""pretrained: a folder that `from_pretrained` of transformers loads, by the model's own `save_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from forge_ship.engine import ExportError
from forge_ship.export_formats.plan import Plan
from forge_ship.export_formats.safetensors import task_in

ABOUT = "a folder of transformers' save_pretrained, with the tokenizer; of peft the adapters"
PACKAGES = ("transformers",)
EXTRA = "forge-trainer[hf]"
FILE = "pretrained"
TOLERANCE = 0.0
WEIGHTS_ONLY = True
ADAPTERS = "adapter_model.safetensors"
"""What peft writes in place of a model: its base is named in `adapter_config.json`."""
PLACE = "forge.json"
"""Says under which name the task has the model: its weights are compared by name."""


def write(plan: Plan, path: Path) -> None:
    task = task_in(plan.model)
    name, model = model_of(task)
    model.save_pretrained(path)
    for part in vars(task).values():  # a tokenizer or a processor is no module
        if hasattr(part, "save_pretrained") and not isinstance(part, nn.Module):
            part.save_pretrained(path)
    note = {"module": name, **({"adapters": _live_names(path / ADAPTERS, model)} if (path / ADAPTERS).exists() else {})}
    (path / PLACE).write_text(json.dumps(note) + "\n", encoding="utf-8")


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
    others = [weight for weight, _ in task.named_parameters() if not weight.startswith(f"{name}.")]
    if others:
        raise ExportError(
            f"--to pretrained: {title} has weights beside {name}, which would be lost: {', '.join(others[:4])}. "
            "Use --to safetensors."
        )
    return name, model


def _live_names(file: Path, model: nn.Module) -> dict[str, str]:
    """Return under which name the model has each tensor that peft saved: peft leaves the adapter's name out."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as saved:
        names = list(saved.keys())
    live = {name.replace(f".{each}.", "."): name for each in model.peft_config for name in model.state_dict()}  # pyright: ignore
    return {name: live[name] for name in names}


def read_file(path: Path) -> dict[str, Tensor]:
    """Load the folder as a user does, and name the weights as the task names them."""
    note = json.loads((path / PLACE).read_text(encoding="utf-8"))
    if "adapters" in note:
        from safetensors.torch import load_file

        return {f"{note['module']}.{note['adapters'][key]}": value for key, value in load_file(path / ADAPTERS).items()}
    import transformers

    (kind,) = json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"]
    made: Any = getattr(transformers, kind).from_pretrained(path)
    return {f"{note['module']}.{key}": tensor for key, tensor in made.state_dict().items()}
