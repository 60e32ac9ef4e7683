"""Capture the whole state of a run as plain data and tensors, at the boundary of an update."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from forge.checkpoint.weights import describe_task
from forge.contract.plugin import Plugin, plugin_options
from forge.contract.run import Run
from forge.env import move
from forge.rng import RNGState
from forge.snapshot import frozen_modules, hidden
from forge.snapshot.divided import together
from forge.snapshot.fingerprint import fingerprint, surroundings
from forge.snapshot.finite import refuse_non_finite


def capture(trainer: Run) -> dict[str, Any]:
    """Return model, optimizers, schedules, counters, data position, means, RNG and every plugin's state.

    Tensors are not copied: copy them before the next update. On several ranks all capture at the same update; state
    that differs between ranks is gathered. A state that is not finite is refused, unless a plugin asks to go back.
    """
    if not trainer.at_boundary:
        raise RuntimeError("A run's state can be captured only at the boundary of an update: request a checkpoint.")
    env = trainer.env
    env.copy_from_first(trainer.task, parameters=False)
    own = {"rng": RNGState.capture(env.device).as_tree(), "means": trainer.means.state_dict()}
    own["rng"] |= hidden.generator_states(trainer)
    data = trainer.feed.state_dict()
    if trainer.feed.live and env.world > 1:
        own["loader"] = data["loader"]
    by_rank = [own] if env.world == 1 else env.gather(move(own, torch.device("cpu")))
    model, plugins = weights_to_save(trainer), plugin_states(trainer)
    if "rewind" not in trainer.requests.open:
        refuse_non_finite(trainer, model, plugins)
    optimizers = trainer.optimizers.state_dict(trainer.task)
    if env.is_divided:
        model, optimizers, plugins = together((model, optimizers, plugins), env)
    frozen = frozen_modules.states(trainer)
    return {
        "model": model,
        "optimizers": optimizers,
        "rates_used": trainer.optimizers.rates_used,
        "flags": flags(trainer.task),
        **({"frozen": frozen} if frozen else {}),
        "progress": dataclasses.asdict(trainer.progress),
        "planned_updates": trainer.planned_updates,
        "data": {**data, "loader": {"by_rank": [rank["loader"] for rank in by_rank]}} if "loader" in own else data,
        "means": own["means"] if env.world == 1 else {"by_rank": [rank["means"] for rank in by_rank]},
        "metrics": {name: float(value) for name, value in trainer.metrics.items() if isinstance(value, (int, float))},
        "left_out": sorted(trainer.skipped_windows),
        "requests": [dataclasses.asdict(r) for r in trainer.requests.open.values() if r.kind == "validation"],
        "plugins": plugins,
        "stack": [describe_plugin(plugin) for plugin in trainer.stack],
        "fingerprint": fingerprint(trainer),
        "task": describe_task(trainer.task),
        "recipe": trainer.recipe.config if trainer.recipe is not None else None,
        "versions": surroundings(trainer),
        "rng": [rank["rng"] for rank in by_rank],
    }


def weights_to_save(trainer: Run) -> dict[str, Any]:
    """Return the task's state; where an optimizer evaluates other weights than it trains, copies of those."""
    task = trainer.task
    with trainer.optimizers.evaluating() as moved:
        copies = {id(p): p.detach().clone() for p in moved}
        named = task.named_parameters(remove_duplicate=False) if moved else ()
        return task.state_dict() | {name: copies[id(p)] for name, p in named if id(p) in copies}


def flags(task: nn.Module) -> dict[str, list[str]]:
    """Return what a run may switch during training: frozen parameters, modules in evaluation mode."""
    return {
        "frozen": [name for name, parameter in task.named_parameters() if not parameter.requires_grad],
        "evaluating": [name for name, module in task.named_modules() if not module.training],
    }


def plugin_states(trainer: Run) -> dict[str, Any]:
    """Return the `forge_state_dict` of every plugin that has one, by name."""
    states = {name: ask(trainer) for name, ask in trainer.stack.implementations("forge_state_dict")}
    return {name: state for name, state in states.items() if state is not None}


def describe_plugin(plugin: Plugin) -> dict[str, Any]:
    """Return a plugin's name and options."""
    return {"name": plugin.name, "observer": plugin.observer, "options": plugin_options(plugin)}
