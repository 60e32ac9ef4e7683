"""Readiness for a long run: what saves it, watches it and makes it repeatable, with the evidence for each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from forge.config.recipe import as_recipe
from forge.contract.plugin import Plugin


@dataclass(frozen=True, slots=True)
class Readiness:
    """One thing that a long run may need."""

    what: str
    is_on: bool
    evidence: str
    why: str = ""
    "Why it may matter."
    missing: str = "note"
    "How much it matters where it is missing: warning or note."


NEEDED = [
    (
        *("checkpoints", ["checkpoint"], "-p checkpoint, which saves and resumes", "warning"),
        "A crash, a full disk or a preempted machine costs everything since the last one.",
    ),
    (
        *("logging", ["tensorboard", "jsonl", "wandb", "mlflow", "csv"], "-p jsonl -p tensorboard", "note"),
        "What is not logged cannot be looked at when the result is odd.",
    ),
    (
        *("failure detection", ["guard", "anomaly"], "-p guard, which stops before a NaN is trained on", "warning"),
        "One NaN in an update makes all weights NaN, and the rest of the run is lost.",
    ),
    (
        *("clipping", ["clip"], "-p clip clip.max_norm=1.0, if gradients spike", "note"),
        "One batch with a huge gradient can undo hours; transformers and recurrent nets need it most.",
    ),
    (
        *("early stopping", ["early_stop"], "-p early_stop, which ends a run that no longer gets better", "note"),
        "A run that has converged, or diverged, goes on costing until its planned end.",
    ),
]
"""What plugins give a long run: the plugins, how to get it, how much it matters, and why."""


def readiness(plugins: Iterable[Plugin], has_val: bool, seed: int | None) -> list[Readiness]:
    """What the planned run has of what a long one needs."""
    names = [plugin.name for plugin in plugins]
    given = "a loader of val is given" if has_val else "pass held-out samples as val"
    heart = "The loss of training goes on falling while the model learns its samples by heart."
    repeated = "Without a seed a result cannot be had again, nor a bug."
    items = [
        Readiness("validation", has_val, given, heart, "warning"),
        Readiness("reproducibility", seed is not None, "set a seed" if seed is None else f"seed={seed}", repeated),
    ]
    for what, wanted, cure, level, why in NEEDED:
        found = [name for name in wanted if name in names]
        items.append(Readiness(what, bool(found), f"by {', '.join(found)}" if found else f"add {cure}", why, level))
    return items


def planned(trainer: dict[str, Any]) -> dict[str, Any]:
    """The settings of the planned run: the arguments of a Trainer over those of its recipe."""
    recipe = trainer.get("recipe")
    return {**(as_recipe(recipe).trainer if recipe is not None else {}), **trainer}
