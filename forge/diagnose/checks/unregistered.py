"""Checks for layers and parameters that torch does not register: in plain containers, or as plain tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from forge.diagnose.checks.user_line import warn_of
from forge.errors import TaskError

NOT_LAYERS = frozenset({"_parameters", "_buffers", "_modules", "trainer", "init_args"})
"""Attributes of a module that are no containers of the user's."""


def refuse_hidden_layers(task: nn.Module) -> None:
    """Refuse trainable layers and parameters in a plain list, tuple, set or dict."""
    registered = {id(parameter) for parameter in task.parameters()}
    for _, path, name, value in _attributes(task):
        if name in NOT_LAYERS or name.startswith("_forward"):
            continue
        hidden = [item for item in _trainable(value, depth=3) if not registered.issuperset(_parameter_ids(item))]
        if hidden:
            holder = "dict" if isinstance(value, dict) else type(value).__name__
            better = {"dict": "nn.ModuleDict"}.get(holder, "nn.ModuleList")
            if all(isinstance(item, nn.Parameter) for item in hidden):
                better = {"dict": "nn.ParameterDict"}.get(holder, "nn.ParameterList")
            error = TaskError(
                f"{path} is a plain {holder} that hides {len(hidden)} trainable "
                f"{type(hidden[0]).__name__}{'s' if len(hidden) > 1 else ''}: no optimizer, device move or file "
                f"would see them. Use {better}, or requires_grad_(False) if they are not to be trained."
            )
            error.finding = "unregistered_parameters"
            raise error


def warn_of_plain_tensors(task: nn.Module) -> None:
    """Warn of a tensor that requires a gradient and is no parameter."""
    for module, path, name, value in _attributes(task):
        plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        # computed tensors are no leaves: a kept loss, the weight that torch's old weight_norm computes from weight_g
        if plain and value.requires_grad and value.is_leaf and f"{name}_g" not in module._parameters:
            warn_of(
                type(module).__init__,
                f"{path} is a tensor that requires a gradient, but no nn.Parameter: no optimizer, device move or file "
                f"sees it. Write self.{name} = nn.Parameter(...) to train it, or self.register_buffer({name!r}, ...) "
                "if it is not to be trained.",
                "unregistered_parameters",
            )


def _attributes(task: nn.Module) -> Iterator[tuple[nn.Module, str, str, Any]]:
    """Yield (module, path, name, value) of the plain attributes of the task and its modules."""
    for prefix, module in task.named_modules():
        for name, value in list(vars(module).items()):
            yield module, f"{type(task).__name__}.{prefix + '.' if prefix else ''}{name}", name, value


def _parameter_ids(item: nn.Module | nn.Parameter) -> set[int]:
    return {id(item)} if isinstance(item, nn.Parameter) else {id(p) for p in item.parameters() if p.requires_grad}


def _trainable(value: Any, depth: int) -> Iterator[nn.Module | nn.Parameter]:
    """Yield trainable modules and parameters inside plain containers; a teacher, in eval mode, is not to be trained."""
    if depth == 0 or not isinstance(value, (list, tuple, set, dict)):
        return
    for item in value.values() if isinstance(value, dict) else value:
        if (isinstance(item, nn.Parameter) and item.requires_grad) or (
            isinstance(item, nn.Module) and item.training and any(p.requires_grad for p in item.parameters())
        ):
            yield item
        else:
            yield from _trainable(item, depth - 1)
