"""Restore: a run goes on from a capture as if it had never stopped."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from forge.checkpoint.checkpoint import Checkpoint
from forge.checkpoint.placing import placed_like
from forge.contract.requests import Request
from forge.errors import CheckpointError
from forge.rng import RNGState, seed_all, seed_of
from forge.snapshot.capture import describe_plugin
from forge.snapshot.fingerprint import differences, fingerprint, refuse_another_model, refuse_another_run, surroundings

if TYPE_CHECKING:
    from forge.contract.run import Run

logger = logging.getLogger("forge")


def resume(trainer: Run, checkpoint: Checkpoint) -> None:
    """Continue from a checkpoint, and say so."""
    restore(trainer, load_for(trainer, checkpoint), str(checkpoint.path))
    logger.info("Continuing from %s.", checkpoint.path)


def load_for(trainer: Run, checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint as this run needs it: of what is sharded here, each rank reads its own part."""
    return checkpoint.load(place=placed_like(dict(trainer.task.named_parameters())))


def restore(trainer: Run, tree: Mapping[str, Any], where: str) -> None:
    """Put everything back as it was captured. Refusals come before anything is changed; the RNG comes last."""
    refuse_another_run(tree["fingerprint"], fingerprint(trainer), where)
    refuse_another_model(tree["model"], trainer.task.state_dict(), where)
    trainer.optimizers.refuse_others(tree["optimizers"], trainer.task, where)
    _check_stack(trainer, tree, where)
    _warn_of_other_surroundings(tree["versions"], surroundings(trainer))
    _refuse_shorter_run(trainer, tree["progress"], where)
    if trainer.optimizers.has_schedules and tree["planned_updates"] != trainer.planned_updates:
        logger.warning(
            "The run was planned for %s updates and is for %s now: a learning-rate schedule that depends on it goes on "
            "otherwise than in a run that was so long from the start.",
            tree["planned_updates"],
            trainer.planned_updates,
        )

    try:
        trainer.task.load_state_dict(tree["model"])
    except RuntimeError as error:
        raise CheckpointError(f"{where} does not fit {type(trainer.task).__name__}: {error}") from error
    restore_flags(trainer.task, tree["flags"])
    trainer.optimizers.load_state_dict(tree["optimizers"], trainer.task)
    trainer.optimizers.rates_used = tree["rates_used"]
    for field, value in tree["progress"].items():
        setattr(trainer.progress, field, value)
    trainer.feed.load_state_dict(tree["data"])
    trainer.means.load_state_dict(tree["means"])
    for asked in tree["requests"]:
        trainer.requests.open[asked["kind"]] = Request(**asked)
    trainer.mark_restored(tree["metrics"], tree["left_out"])
    states = tree["plugins"]
    for name, take in trainer.stack.implementations("forge_load_state_dict"):
        if name in states:
            take(trainer, states[name])
    restore_rng(trainer, tree)


def restore_flags(task: nn.Module, saved: Mapping[str, list[str]]) -> None:
    """Which parameters are trained, and which modules are in training mode."""
    frozen, evaluating = set(saved["frozen"]), set(saved["evaluating"])
    for name, parameter in task.named_parameters():
        if parameter.requires_grad != (name not in frozen):
            parameter.requires_grad_(name not in frozen)
    for name, module in task.named_modules():
        module.training = name not in evaluating


def restore_rng(trainer: Run, tree: Mapping[str, Any]) -> None:
    """The last act: whatever the other parts drew while they were put back is forgotten. A rank that was not there
    before gets numbers of its own."""
    env, kept = trainer.env, tree["rng"]
    if env.rank < len(kept):
        RNGState.from_tree(kept[env.rank]).restore(env.device)
    else:
        seed_all(seed_of(trainer.seed or 0, env.data_rank, trainer.progress.update))


def _check_stack(trainer: Run, tree: Mapping[str, Any], where: str) -> None:
    """State goes by plugin name: order is free, observers come and go, other state must find its plugin, and a plugin
    that begins with state must find its own."""
    then = {plugin["name"]: plugin for plugin in tree["stack"]}
    now = {plugin.name: describe_plugin(plugin) for plugin in trainer.stack}
    takers = {name for name, _ in trainer.stack.implementations("forge_load_state_dict")}
    lost = [name for name in tree["plugins"] if name not in takers and not then.get(name, {}).get("observer")]
    new = [name for name in takers if name not in tree["plugins"] and name in now and not now[name]["observer"]]
    new = _begin_with_state(trainer, [name for name in new if name not in then])
    if lost or new:
        odd = [f"{name!r} has state in it, but is not in this stack" for name in lost]
        odd += [f"{name!r} is in this stack, but has no state in it" for name in new]
        if not trainer.allow_inexact:
            raise CheckpointError(
                f"{where}: {'; '.join(odd)}. Use the same stack, or say allow_inexact=True (trainer.allow_inexact=true "
                "on the command line)."
            )
        logger.warning("%s: %s. The run will not be the same (allow_inexact).", where, "; ".join(odd))
    for name in sorted(then.keys() ^ now.keys()):
        if not (then.get(name) or now[name])["observer"] and name not in (*lost, *new):
            moved = "was in the stack before, and is not now" if name in then else "was not in the stack before"
            logger.warning("plugin %r %s: from here on the run may differ from the one it continues.", name, moved)
    for name in then.keys() & now.keys():
        changed = differences(then[name]["options"], now[name]["options"])
        if not now[name]["observer"]:
            for option, old, new_value in changed:
                logger.warning("%s.%s was %r and is %r from here on.", name, option, old, new_value)


def _begin_with_state(trainer: Run, names: Collection[str]) -> list[str]:
    """Which of these plugins have state before a run's first update; the others have nothing that could be missing."""
    given = trainer.stack.implementations("forge_state_dict")
    return [name for name, ask in given if name in names and ask(trainer) is not None]


def _warn_of_other_surroundings(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    odd = [f"{name} {old} -> {new}" for name, old, new in differences(then, now)]
    if odd:
        logger.warning("Continuing with %s: the last bits may come out differently.", ", ".join(odd))


def _refuse_shorter_run(trainer: Run, progress: Mapping[str, int], where: str) -> None:
    """A run may grow; it cannot end before the point it is continued from."""
    for limit, unit in ((trainer.max_epochs, "epoch"), (trainer.max_updates, "update")):
        if limit is not None and progress[unit] > limit:
            raise CheckpointError(
                f"{where} has {progress[unit]} {unit}s behind it, and max_{unit}s is {limit}: there is nothing to do."
            )
