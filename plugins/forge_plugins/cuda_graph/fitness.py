"""What a run must be like for its step to be captured, and whether it still is."""

from __future__ import annotations

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

import forge
from forge.optimizers import Optimizers
from forge.plugin import Plugin

INSIDE = (
    "forge_prepare_batch",
    "forge_micro_step",
    "forge_forward",
    "forge_backward",
    "forge_finalize_grads",
    "forge_inspect_grads",
    "forge_edit_grads",
    "forge_optimizer_step",
)
"""The hooks that run inside the capture."""
MOVES = ("params", "lr", "initial_lr")
"""What an optimizer's group holds beside constants."""


def of_the_run(trainer: forge.Trainer, optimizers: Optimizers) -> str | None:
    """Why nothing of this run can be captured; None where it can."""
    if trainer.env.device.type != "cuda":
        return f"there are graphs on CUDA only, and the run is on {trainer.env.device.type}"
    if trainer.env.world > 1:
        return "steps of several ranks are not captured"
    if optimizers.named:
        return "several optimizers take turns"
    entry = optimizers.entries[None]
    if entry.needs_closure:
        return f"{type(entry.optimizer).__name__} runs the step several times, and decides on the host how often"
    return _of_the_optimizer(entry.optimizer)


def _of_the_optimizer(optimizer: Optimizer) -> str | None:
    if type(optimizer) in (SGD, Adam, AdamW) or "capturable" in optimizer.defaults:
        return None
    return (
        f"{type(optimizer).__name__} has no option `capturable`: torch's Adam, AdamW, SGD, NAdam, RAdam, Adamax, "
        "Adadelta, ASGD, Rprop and RMSprop can be captured"
    )


def make_capturable(optimizer: Optimizer) -> None:
    """Have the optimizer keep everything on the device: `fused` where torch has it, else `capturable`."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        if type(optimizer) in (SGD, Adam, AdamW) and not group.get("differentiable"):
            group["fused"], group["foreach"] = True, False
            optimizer._step_supports_amp_scaling = True  # pyright: ignore[reportAttributeAccessIssue]


class Fitness:
    """What the graphs of a run depend on, looked at when the first is made."""

    def __init__(self, trainer: forge.Trainer):
        self._trainer = trainer
        self._plugins = _inside(trainer)
        self._at_intervals = [p for p in self._plugins if not p.capturable and _has_due(p)]
        self._model, self._restores = trainer.model, trainer.restores
        self._parameters = list(trainer.task.parameters())
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        groups = trainer.optimizers[None].param_groups
        self._options = [(g, key, value) for g in groups for key, value in g.items() if key not in MOVES]
        "What a graph has as constants: momentum, decay, betas."
        self._places: list[int] | None = None

    def of_the_stack(self) -> str | None:
        """The plugin that keeps the step from being captured."""
        for plugin in self._plugins:
            if not plugin.capturable and not _has_due(plugin):
                return (
                    f"{plugin.name!r} acts inside every update and is not made for a graph (it declares no capturable)"
                )
        return None

    def somebody_is_due(self, step: forge.Step) -> bool:
        """Whether a plugin that cannot be captured acts in this update."""
        return any(plugin.due(step) for plugin in self._at_intervals)

    def change(self, closely: bool) -> str | None:
        """Why graphs made before would compute something else than the run does now; None where they would not."""
        trainer = self._trainer
        if trainer.model is not self._model:
            return "the model is another one"
        if trainer.restores != self._restores:
            return "the run was restored"
        for parameter, trained in zip(self._parameters, self._trained, strict=True):
            if parameter.requires_grad is not trained:
                return "other parameters are trained"
        for group, key, value in self._options:
            if group[key] is not value and group[key] != value:
                return f"the optimizer's {key} changed"
        if not closely:
            return None
        before, self._places = self._places, self._addresses()
        return "tensors have moved" if before is not None and before != self._places else None

    def _addresses(self) -> list[int]:
        optimizer, task = self._trainer.optimizers[None], self._trainer.task
        kept = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        training = [int(module.training) for module in task.modules()]
        return [t.data_ptr() for t in (*task.parameters(), *task.buffers(), *kept)] + training


def _inside(trainer: forge.Trainer) -> list[Plugin]:
    calls = trainer.stack.calls()
    names = {call.plugin for hook in INSIDE for call in calls.get(hook, ())}
    return [plugin for plugin in trainer.stack if plugin.name in names]


def _has_due(plugin: Plugin) -> bool:
    """Whether a plugin says when it acts."""
    every = getattr(plugin, "every", plugin)
    return type(plugin).due is not Plugin.due and every is not None
