"""Restore a captured state, so that the run continues as if it had never stopped."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from forge.checkpoint import captured
from forge.checkpoint.checkpoint import StoredCheckpoint
from forge.checkpoint.placing import placed_like
from forge.checkpoint.readers import Readers
from forge.checkpoint.weights import as_saved_by
from forge.contract.requests import Request
from forge.contract.run import Run
from forge.errors import CheckpointError, ForgeError
from forge.rng import RNGState, seed_all, seed_of
from forge.snapshot import frozen_modules, hidden
from forge.snapshot.capture import describe_plugin
from forge.snapshot.fingerprint import differences, fingerprint, refuse_another_model, refuse_another_run, surroundings

logger = logging.getLogger("forge")


def resume(trainer: Run, checkpoint: StoredCheckpoint) -> None:
    """Resume from a checkpoint, and log it. A complete run is refused if options of its plugins have changed."""
    tree = load_for(trainer, checkpoint)
    restore(trainer, tree, str(checkpoint.path))
    if trainer.limit_reached is None and "stop" not in trainer.requests.open:
        logger.info("Resuming from %s.", checkpoint.path)
        return
    for change in _changed_options(trainer, tree):
        raise CheckpointError(
            f"{checkpoint.path}: this run is already complete, and {change}: nothing is left to train with it. Raise "
            "max_epochs or max_updates to train on, or choose another run folder for a new run."
        )
    done = f"{trainer.progress.epoch:,} epochs, {trainer.progress.update:,} updates"
    logger.info("%s: this run is already complete (%s); nothing is left to train.", checkpoint.path, done)


def load_for(trainer: Run, checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """Load a checkpoint for this run: each rank reads only its shards, and hashes its share of the files."""
    place = placed_like(dict(trainer.task.named_parameters()), trainer.env.holds)
    return checkpoint.load(place=place, readers=Readers.of(trainer.env))


def restore(trainer: Run, tree: Mapping[str, Any], where: str) -> None:
    """Restore a capture. All checks come before any change; the RNG is restored last."""
    captured.check(tree, where)
    try:
        _restore(trainer, tree, where)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, (ForgeError, *RuntimeError.__subclasses__())):  # those of devices and of other ranks
            raise
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"{where} does not fit this run ({said}): forge did not write it, or a plugin or loader has changed. Use "
            "another checkpoint, or start a new run."
        ) from error


def _restore(trainer: Run, tree: Mapping[str, Any], where: str) -> None:
    refuse_another_run(tree["fingerprint"], fingerprint(trainer), where)
    refuse_another_model(tree["model"], trainer.task.state_dict(), where)
    frozen_modules.refuse_others(trainer, tree.get("frozen", {}), where)
    trainer.optimizers.refuse_others(tree["optimizers"], trainer.task, where)
    _check_stack(trainer, tree, where)
    changed = [f"{name} {old} -> {new}" for name, old, new in differences(tree["versions"], surroundings(trainer))]
    if changed:
        logger.warning("Resuming with %s: the last bits may differ.", ", ".join(changed))
    _refuse_shorter_run(trainer, tree["progress"], where)
    if trainer.optimizers.has_schedules and tree["planned_updates"] != trainer.planned_updates:
        logger.warning(
            "The run was planned for %s updates and is now for %s: a learning-rate schedule that depends on it differs "
            "from that of a run of this length from the start.",
            tree["planned_updates"],
            trainer.planned_updates,
        )

    try:
        trainer.task.load_state_dict(as_saved_by(trainer.task, tree["model"]))
    except RuntimeError as error:
        raise CheckpointError(f"{where} does not fit {type(trainer.task).__name__}: {error}") from error
    restore_flags(trainer.task, tree["flags"])
    frozen_modules.restore(trainer, tree.get("frozen", {}), where)
    trainer.optimizers.load_state_dict(tree["optimizers"], trainer.task)
    trainer.optimizers.rates_used = tree["rates_used"]
    for field in fields(trainer.progress):
        setattr(trainer.progress, field.name, tree["progress"].get(field.name, 0))
    data = tree["data"]
    if trainer.feed.live and trainer.env.world > 1:
        data = {**data, "loader": data["loader"]["by_rank"][trainer.env.rank]}
    trainer.feed.load_state_dict(data)
    trainer.means.load_state_dict(tree["means"])
    for asked in tree["requests"]:
        known = {field.name: asked[field.name] for field in fields(Request) if field.name in asked}
        trainer.requests.open[asked["kind"]] = Request(**known)  # an earlier version had another field
    trainer.mark_restored(tree["metrics"], tree["left_out"])
    states = tree["plugins"]
    for name, take in trainer.stack.implementations("forge_load_state_dict"):
        if name in states:
            take(trainer, states[name])
    restore_rng(trainer, tree)


def restore_flags(task: nn.Module, saved: Mapping[str, list[str]]) -> None:
    """Restore which parameters are trained and which modules are in training mode."""
    frozen, evaluating = set(saved["frozen"]), set(saved["evaluating"])
    for name, parameter in task.named_parameters():
        if parameter.requires_grad != (name not in frozen):
            parameter.requires_grad_(name not in frozen)
    for name, module in task.named_modules():
        module.training = name not in evaluating


def restore_rng(trainer: Run, tree: Mapping[str, Any]) -> None:
    """Restore the RNG, last, to discard the draws of the other parts. A new rank gets its own seed."""
    env, kept = trainer.env, tree["rng"]
    if env.rank < len(kept):
        RNGState.from_tree(kept[env.rank]).restore(env.device)
        hidden.restore_generators(trainer, kept[env.rank])
    else:
        seed_all(seed_of(trainer.seed or 0, env.seed_rank, trainer.progress.update))


def _check_stack(trainer: Run, tree: Mapping[str, Any], where: str) -> None:
    """Match plugin states by name. Order is free and observers may change; any other state needs its plugin, and a
    plugin with initial state needs its saved state."""
    then = {plugin["name"]: plugin for plugin in tree["stack"]}
    now = {plugin.name: describe_plugin(plugin) for plugin in trainer.stack}
    takers = {name for name, _ in trainer.stack.implementations("forge_load_state_dict")}
    lost = [name for name in tree["plugins"] if name not in takers and not then.get(name, {}).get("observer")]
    new = [name for name in takers if name not in tree["plugins"] and name in now and not now[name]["observer"]]
    new = _begin_with_state(trainer, [name for name in new if name not in then])
    if lost or new:
        odd = [f"it has state of {name!r}, which is not in this stack" for name in lost]
        odd += [f"it has no state of {name!r}, which is in this stack" for name in new]
        if not trainer.allow_inexact:
            raise CheckpointError(
                f"{where}: {'; '.join(odd)}. Use the same stack, or set allow_inexact=True (trainer.allow_inexact=true "
                "on the command line)."
            )
        logger.warning("%s: %s. The resumed run will differ (allow_inexact).", where, "; ".join(odd))
    for name in sorted(then.keys() ^ now.keys()):
        if not (then.get(name) or now[name])["observer"] and name not in (*lost, *new):
            moved = "was removed from the stack" if name in then else "was added to the stack"
            logger.warning("plugin %r %s: from here on the run may differ from the one it resumes.", name, moved)
    for change in _changed_options(trainer, tree):
        logger.warning("%s from here on.", change)


def _changed_options(trainer: Run, tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of plugins that have changed, with both values; those of observers do not count."""
    then = {plugin["name"]: plugin["options"] for plugin in tree["stack"]}
    for plugin in (plugin for plugin in trainer.stack if plugin.name in then and not plugin.observer):
        for option, old, new in differences(then[plugin.name], describe_plugin(plugin)["options"]):
            yield f"{plugin.name}.{option} was {old!r} and is {new!r}"


def _begin_with_state(trainer: Run, names: Collection[str]) -> list[str]:
    """Return which of these plugins have state before the first update; the others miss nothing."""
    given = trainer.stack.implementations("forge_state_dict")
    return [name for name, ask in given if name in names and ask(trainer) is not None]


def _refuse_shorter_run(trainer: Run, progress: Mapping[str, int], where: str) -> None:
    """Raise if a limit lies before the point to resume from; a longer run is fine."""
    for limit, unit in ((trainer.max_epochs, "epoch"), (trainer.max_updates, "update")):
        if limit is not None and progress[unit] > limit:
            raise CheckpointError(
                f"{where} was saved after {progress[unit]} {unit}s, and max_{unit}s is {limit}: raise it to train on."
            )
