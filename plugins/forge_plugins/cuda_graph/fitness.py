"""Conditions for capturing the step of a run, and changes that invalidate a graph."""

from __future__ import annotations

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

import forge
from forge.contract.plugin import Plugin
from forge.contract.stack import INSIDE, TASK
from forge.optim.optimizers import Optimizers

OPTION = "the optimizer's"
MOVES = ("params", "lr", "initial_lr")
"""Entries of a parameter group that are not constants."""


def of_the_run(trainer: forge.Run, optimizers: Optimizers) -> str | None:
    """Return why this run cannot be captured, or None."""
    if trainer.env.device.type != "cuda":
        return f"graphs run on CUDA only, and the run is on {trainer.env.device.type}"
    if trainer.env.world > 1:
        return "steps of several ranks are not captured"
    if optimizers.named:
        return "several optimizers take turns"
    entry = optimizers.entries[None]
    if entry.needs_closure:
        return f"{type(entry.optimizer).__name__} runs the step several times, and decides on the host how often"
    sparse = [name for name, module in trainer.task.named_modules() if getattr(module, "sparse", False) is True]
    if sparse:
        return f"the gradient of {sparse[0]} is sparse, and its size differs from update to update"
    return _of_the_optimizer(entry.optimizer)


def of_the_metrics(trainer: forge.Run) -> str | None:
    """The metric of torchmetrics that training updates: its state is replaced, and a graph would add to it no more."""
    updated = trainer.means.task_metrics.updated() if trainer.means.task_metrics is not None else []
    if not updated:
        return None
    return (
        f"training_step updates the metric {updated[0]!r}, which a graph would not accumulate; update it in "
        "validation_step alone, and return a tensor in training"
    )


def _of_the_optimizer(optimizer: Optimizer) -> str | None:
    if type(optimizer) in (SGD, Adam, AdamW) or "capturable" in optimizer.defaults:
        return None
    return (
        f"{type(optimizer).__name__} has no option `capturable`: torch's Adam, AdamW, SGD, NAdam, RAdam, Adamax, "
        "Adadelta, ASGD, Rprop and RMSprop can be captured"
    )


def make_capturable(optimizer: Optimizer) -> None:
    """Have the optimizer keep everything on the device: `fused` where torch has it, else `capturable`.

    A checkpoint of an uncaptured run brings other options along, and counters on the host: they are moved.
    """
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        if type(optimizer) in (SGD, Adam, AdamW) and not group.get("differentiable"):
            group["fused"], group["foreach"] = True, False
            optimizer._step_supports_amp_scaling = True  # pyright: ignore[reportAttributeAccessIssue]
        for parameter in group["params"]:
            counter = optimizer.state.get(parameter, {}).get("step")
            if isinstance(counter, torch.Tensor) and counter.device != parameter.device:
                optimizer.state[parameter]["step"] = counter.to(parameter.device, torch.float32)


class Fitness:
    """The state that the graphs of a run depend on, recorded before the first capture."""

    def __init__(self, trainer: forge.Run):
        self._trainer = trainer
        self._plugins = _inside(trainer)
        self._at_intervals = [p for p in self._plugins if not p.capturable and _has_due(p)]
        self._model, self._restores = trainer.model, trainer.restores
        self._parameters, self._modules = list(trainer.task.parameters()), list(trainer.task.modules())
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._training = [module.training for module in self._modules]
        optimizer = trainer.optimizers[None]
        self._state, self._groups = optimizer.state, list(optimizer.param_groups)
        self._sizes = [len(group["params"]) for group in self._groups]
        self._options = [(g, key, value) for g in self._groups for key, value in g.items() if key not in MOVES]
        "Constants of a graph: momentum, decay, betas."
        self._weights: list[int] = []
        self._places: list[int] = []

    def remember(self) -> None:
        """Record the addresses that a graph captured now reads and writes."""
        self._weights = [parameter.data_ptr() for parameter in self._parameters]
        self._places = self._addresses()

    def of_the_stack(self) -> str | None:
        """Return which plugin or task hook prevents a capture, or None."""
        for plugin in self._trainer.stack:
            if "activation_checkpointing" in plugin.provides:
                return f"{plugin.name!r} restores the generator's state, which a graph cannot do"
        for plugin in self._plugins:
            if not plugin.capturable and not _has_due(plugin):
                return f"{plugin.name!r} acts inside every update and cannot be captured (capturable is False)"
        own = [hook for hook in INSIDE if any(call.plugin == TASK for call in self._trainer.stack.calls()[hook])]
        if own and not getattr(self._trainer.task, "capturable", False):
            return f"the task's {own[0]} acts inside every update; set `capturable = True` on the task to allow it"
        return None

    def any_plugin_due(self, step: forge.Step) -> bool:
        """Whether a plugin that cannot be captured acts in this update."""
        return any(plugin.due(step) for plugin in self._at_intervals)

    def change(self, closely: bool) -> str | None:
        """Return what has changed since the graphs were captured, or None."""
        trainer, optimizer = self._trainer, self._trainer.optimizers[None]
        if trainer.model is not self._model:
            return "the model was replaced"
        if trainer.restores != self._restores:
            return "the run was restored"
        for parameter, trained, place in zip(self._parameters, self._trained, self._weights, strict=True):
            if parameter.requires_grad is not trained:
                return "the set of trained parameters changed"
            if parameter.data_ptr() != place:
                return "a parameter has moved"
        for module, training in zip(self._modules, self._training, strict=True):
            if module.training is not training:
                return f"a {type(module).__name__} was switched to another mode"
        if optimizer.state is not self._state or len(optimizer.param_groups) != len(self._groups):
            return "the optimizer has another state"
        for group, known, size in zip(optimizer.param_groups, self._groups, self._sizes, strict=True):
            if group is not known or len(group["params"]) != size:
                return "the optimizer has other parameter groups"
        for group, key, value in self._options:
            if group[key] is not value and group[key] != value:
                return f"{OPTION} {key} changed"
        return "tensors have moved" if closely and self._addresses() != self._places else None

    def _addresses(self) -> list[int]:
        kept = [t for state in self._state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        return [t.data_ptr() for t in (*self._trainer.task.buffers(), *kept)]


def _inside(trainer: forge.Run) -> list[Plugin]:
    calls = trainer.stack.calls()
    names = {call.plugin for hook in INSIDE for call in calls.get(hook, ())}
    return [plugin for plugin in trainer.stack if plugin.name in names]


def _has_due(plugin: Plugin) -> bool:
    """Whether a plugin acts at intervals."""
    every = getattr(plugin, "every", plugin)
    return type(plugin).due is not Plugin.due and every is not None
