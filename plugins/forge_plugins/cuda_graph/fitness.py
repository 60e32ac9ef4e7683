"""Conditions for capturing the step of a run, and changes that invalidate a graph."""

from __future__ import annotations

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

import forge
from forge.contract.plugin import Plugin
from forge.contract.stack import INSIDE, TASK
from forge.optim.optimizers import Optimizers
from forge_plugins.cuda_graph.extent import Extent

OPTION = "the optimizer's"
MOVES = ("params", "lr", "initial_lr")
"""Entries of a parameter group that are not constants."""
IN_WINDOW = ("forge_prepare_batch", "forge_micro_step", "forge_forward", "forge_backward")
"""The hooks up to the backward pass."""
AFTER = ("forge_finalize_grads", "forge_inspect_grads", "forge_edit_grads")
"""The hooks between the backward pass and the optimizer's step."""


def of_the_run(trainer: forge.Run, optimizers: Optimizers) -> str | None:
    """Return why this run cannot be captured, or None."""
    if trainer.env.device.type != "cuda":
        return f"graphs run on CUDA only, and the run is on {trainer.env.device.type}"
    if trainer.env.world > 1:
        return "steps of several ranks are not captured"
    for entry in optimizers.entries.values():
        if entry.needs_closure:
            return f"{type(entry.optimizer).__name__} runs the step several times, and decides on the host how often"
    sparse = [name for name, module in trainer.task.named_modules() if getattr(module, "sparse", False) is True]
    if sparse:
        return f"the gradient of {sparse[0]} is sparse, and its size differs from update to update"
    return None


def of_the_metrics(trainer: forge.Run) -> str | None:
    """The metric of torchmetrics that training updates: its state is replaced, and a graph would add to it no more."""
    updated = trainer.means.task_metrics.updated() if trainer.means.task_metrics is not None else []
    if not updated:
        return None
    return (
        f"training_step updates the metric {updated[0]!r}, which a graph would not accumulate; update it in "
        "validation_step alone, and return a tensor in training"
    )


def of_the_optimizers(optimizers: Optimizers) -> str | None:
    """Return why the optimizers' steps cannot be captured, or None."""
    for entry in optimizers.entries.values():
        if not is_capturable(entry.optimizer):
            return (
                f"{type(entry.optimizer).__name__} has no option `capturable`: torch's Adam, AdamW, SGD, NAdam, RAdam, "
                "Adamax, Adadelta, ASGD, Rprop and RMSprop can be captured"
            )
        moving = [item.schedule for item in entry.schedules if _moves_momentum(item.schedule)]
        if moving:
            what = "betas" if "betas" in entry.optimizer.param_groups[0] else "momentum"
            return f"{type(moving[0]).__name__} changes the optimizer's {what}, which a graph holds as a constant"
    return None


def is_capturable(optimizer: Optimizer) -> bool:
    return type(optimizer) in (SGD, Adam, AdamW) or "capturable" in getattr(optimizer, "defaults", ())


def _moves_momentum(schedule: object) -> bool:
    parts = getattr(schedule, "_schedulers", None)  # SequentialLR, ChainedScheduler
    return bool(getattr(schedule, "cycle_momentum", False)) or any(map(_moves_momentum, parts or ()))


def make_capturable(optimizer: Optimizer) -> None:
    """Have the optimizer keep everything on the device: `fused` where torch has it, else `capturable`.

    A checkpoint of an uncaptured run brings other options along, and counters on the host: they are moved. An optimizer
    that cannot be captured is left as it is.
    """
    if not is_capturable(optimizer):
        return
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


def of_the_stack(trainer: forge.Run) -> str | None:
    """Return which plugin or task hook prevents any capture, or None."""
    for plugin in _uncapturable(trainer):
        if plugin.capturable != "window" and _acts_in(trainer, plugin, IN_WINDOW):
            return _acts(plugin)
    own = [hook for hook in INSIDE if any(call.plugin == TASK for call in trainer.stack.calls()[hook])]
    if own and not getattr(trainer.task, "capturable", False):
        return f"the task's {own[0]} acts inside every update; set `capturable = True` on the task to allow it"
    return None


def extent(trainer: forge.Run) -> tuple[Extent, str]:
    """Return how much of an update the stack and the optimizers let into a graph, and why not all."""
    found = _uncapturable(trainer)
    for plugin in found:
        if _acts_in(trainer, plugin, AFTER):
            return Extent.WINDOW, _acts(plugin)
    reason = _acts(found[0]) if found else of_the_optimizers(trainer.optimizers)
    return (Extent.UPDATE, "") if reason is None else (Extent.GRADIENTS, reason)


class Fitness:
    """The state that the graphs of a run depend on, recorded before the first capture."""

    def __init__(self, trainer: forge.Run, holds_optimizers: bool = True):
        self._trainer = trainer
        self._at_intervals = [p for p in _inside(trainer) if p.capturable is not True and _has_due(p)]
        self._model, self._restores = trainer.model, trainer.restores
        self._parameters, self._modules = list(trainer.task.parameters()), list(trainer.task.modules())
        self._trained: dict[str | None, list[bool]] = {}
        "By optimizer, whose turn sets `requires_grad` off for the parameters of the others."
        self._training = [module.training for module in self._modules]
        optimizers = list(trainer.optimizers.values()) if holds_optimizers else []
        self._optimizers = [(o, o.state, [(g, len(g["params"])) for g in o.param_groups]) for o in optimizers]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._options = [(g, key, value) for g in groups for key, value in g.items() if key not in MOVES]
        "Constants of a graph: momentum, decay, betas."
        self._weights: list[int] = []
        self._places: list[int] = []

    def remember(self, turn: str | None) -> None:
        """Record what a graph captured now, in an optimizer's turn, reads and writes."""
        self._trained[turn] = [parameter.requires_grad for parameter in self._parameters]
        self._weights = [parameter.data_ptr() for parameter in self._parameters]
        self._places = self._addresses()

    def any_plugin_due(self, step: forge.Step) -> bool:
        """Whether a plugin that cannot be captured acts in this update."""
        return any(plugin.due(step) for plugin in self._at_intervals)

    def change(self, turn: str | None, closely: bool) -> str | None:
        """Return what has changed since the graphs were captured, or None."""
        trainer = self._trainer
        if trainer.model is not self._model:
            return "the model was replaced"
        if trainer.restores != self._restores:
            return "the run was restored"
        for parameter, trained in zip(self._parameters, self._trained.get(turn, ()), strict=False):
            if parameter.requires_grad is not trained:
                return "the set of trained parameters changed"
        for parameter, place in zip(self._parameters, self._weights, strict=True):
            if parameter.data_ptr() != place:
                return "a parameter has moved"
        for module, training in zip(self._modules, self._training, strict=True):
            if module.training is not training:
                return f"a {type(module).__name__} was switched to another mode"
        moved = self._change_of_optimizers()
        if moved is not None:
            return moved
        return "tensors have moved" if closely and self._addresses() != self._places else None

    def _change_of_optimizers(self) -> str | None:
        for optimizer, state, groups in self._optimizers:
            if optimizer.state is not state or len(optimizer.param_groups) != len(groups):
                return "the optimizer has another state"
            for group, (known, size) in zip(optimizer.param_groups, groups, strict=True):
                if group is not known or len(group["params"]) != size:
                    return "the optimizer has other parameter groups"
        for group, key, value in self._options:
            if group[key] is not value and group[key] != value:
                return f"{OPTION} {key} changed"
        return None

    def _addresses(self) -> list[int]:
        states = [each for _, state, _ in self._optimizers for each in state.values()]
        kept = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
        return [t.data_ptr() for t in (*self._trainer.task.buffers(), *kept)]


def _uncapturable(trainer: forge.Run) -> list[Plugin]:
    """Return the plugins that act inside every update and cannot be captured."""
    return [plugin for plugin in _inside(trainer) if plugin.capturable is not True and not _has_due(plugin)]


def _acts_in(trainer: forge.Run, plugin: Plugin, hooks: tuple[str, ...]) -> bool:
    calls = trainer.stack.calls()
    return any(call.plugin == plugin.name for hook in hooks for call in calls.get(hook, ()))


def _acts(plugin: Plugin) -> str:
    return f"{plugin.name!r} acts inside every update and cannot be captured (capturable is False)"


def _inside(trainer: forge.Run) -> list[Plugin]:
    calls = trainer.stack.calls()
    names = {call.plugin for hook in INSIDE for call in calls.get(hook, ())}
    return [plugin for plugin in trainer.stack if plugin.name in names]


def _has_due(plugin: Plugin) -> bool:
    """Whether a plugin acts at intervals."""
    every = getattr(plugin, "every", plugin)
    return type(plugin).due is not Plugin.due and every is not None
