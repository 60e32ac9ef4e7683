"""State that no `state_dict` holds, in the task, its optimizers, schedules and the data that are made in this process.

Generators among it are saved and restored. Other values are compared by a rehearsal (`forge.snapshot.evidence`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from forge.contract.run import Run
from forge.data.own_generators import data_roots
from forge.util.generators import find_generators, generator_state, set_generator_state
from forge.util.text import few

logger = logging.getLogger("forge")

HIDDEN = "hidden"
"""The key of the generators' states, beside those of the global ones."""

SAVED_BY_OPTIMIZERS = ("state", "param_groups", "defaults")


# -- generators -------------------------------------------------------------------------------------------------------


def generator_states(trainer: Run) -> dict[str, Any]:
    """Return {"hidden": states by path} of the generators in the task, its optimizers and the data; {} if none."""
    found = {path: generator_state(generator) for path, generator in find_generators(roots(trainer)).items()}
    drawn = trainer.feed.generator_states()
    states = found | {path: state for path, state in drawn.items() if path in found}
    return {HIDDEN: states} if states else {}


def restore_generators(trainer: Run, saved: Mapping[str, Any]) -> None:
    """Restore the generators by path; warn of those that are only in the checkpoint, or only in this run."""
    states: Mapping[str, Any] = saved.get(HIDDEN, {})
    found = find_generators(roots(trainer))
    lost = [p for p, state in states.items() if p not in found or not set_generator_state(found[p], state)]
    new = [path for path in found if path not in states]
    if lost:
        logger.warning(
            "The checkpoint has the state of %s, which this run does not have (yet): create the generator before fit, "
            "with the same transforms and number of workers, or the run differs from here on.",
            few(lost, 4),
        )
    if new:
        text = "The checkpoint has no state of %s: it starts from its first state, so the run may differ."
        logger.warning(text, few(new, 4))


def roots(trainer: Run) -> dict[str, Any]:
    """Return the objects of a run that may hold generators and values of the user's, by name."""
    found: dict[str, Any] = {"task": trainer.task}
    for name, entry in trainer.optimizers.entries.items():
        label = "optimizer" if name is None else f"optimizer {name!r}"
        own = {key: value for key, value in vars(entry.optimizer).items() if key not in SAVED_BY_OPTIMIZERS}
        found |= {label: own, **_schedules(entry.schedules, label)}
    given = {"train": trainer.feed.loader}
    for stage, loaders in trainer.loaders.items():
        for name, loader in loaders.items() if stage != "train" else ():
            given[stage if name is None else f"{stage}/{name}"] = loader
    for stage, loader in given.items():
        found |= data_roots(loader, stage)
    return found


def _schedules(schedules: Iterable[Any], label: str) -> dict[str, Any]:
    """Return the functions of schedules, whose closures torch does not save."""
    functions = {f"{label}'s schedule {i}": _functions(item.schedule) for i, item in enumerate(schedules)}
    return {name: found for name, found in functions.items() if found}


def _functions(schedule: Any) -> list[Any]:
    given = [*getattr(schedule, "lr_lambdas", ()), *(_functions(s) for s in getattr(schedule, "_schedulers", ()))]
    return [function for function in given if isinstance(function, list) or hasattr(function, "__code__")]
