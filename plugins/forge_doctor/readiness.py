"""Readiness for a long run: what saves it, watches it and makes it repeatable, with the evidence for each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.config.recipe import load_unbuilt
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


def readiness(plugins: Iterable[Plugin], has_val: bool, seed: int | None) -> list[Readiness]:
    """What the planned run has of what a long one needs."""
    names = [plugin.name for plugin in plugins]
    return [
        _plugin(
            "checkpoints",
            names,
            ["checkpoint"],
            "-p checkpoint, which saves and resumes",
            "A crash, a full disk or a preempted machine costs everything since the last one.",
            "warning",
        ),
        Readiness(
            "validation",
            has_val,
            "a loader of val is given" if has_val else "pass held-out samples as val",
            "The loss of training goes on falling while the model learns its samples by heart.",
            "warning",
        ),
        _plugin(
            "logging",
            names,
            ["tensorboard", "jsonl", "wandb", "mlflow", "csv"],
            "-p jsonl -p tensorboard",
            "What is not logged cannot be looked at when the result is odd.",
        ),
        Readiness(
            "reproducibility",
            seed is not None,
            f"seed={seed}" if seed is not None else "set a seed",
            "Without a seed a result cannot be had again, nor a bug.",
        ),
        _plugin(
            "failure detection",
            names,
            ["guard", "anomaly"],
            "-p guard, which stops before a NaN is trained on",
            "One NaN in an update makes all weights NaN, and the rest of the run is lost.",
            "warning",
        ),
        _plugin(
            "clipping",
            names,
            ["clip"],
            "-p clip clip.max_norm=1.0, if gradients spike",
            "One batch with a huge gradient can undo hours; transformers and recurrent nets need it most.",
        ),
        _plugin(
            "early stopping",
            names,
            ["early_stop"],
            "-p early_stop, which ends a run that no longer gets better",
            "A run that has converged, or diverged, goes on costing until its planned end.",
        ),
    ]


def _plugin(what: str, names: list[str], wanted: list[str], cure: str, why: str, missing: str = "note") -> Readiness:
    found = [name for name in wanted if name in names]
    return Readiness(what, bool(found), f"by {', '.join(found)}" if found else f"add {cure}", why, missing)


def planned(trainer: dict[str, Any]) -> dict[str, Any]:
    """The settings of the planned run: the arguments of a Trainer over those of its recipe."""
    recipe = trainer.get("recipe")
    if isinstance(recipe, (str, Path)):
        recipe = load_unbuilt(recipe, frozenset())
    return {**(recipe.trainer if recipe is not None else {}), **trainer}
