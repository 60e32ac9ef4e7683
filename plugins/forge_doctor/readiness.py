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
    """One thing that a long run needs."""

    what: str
    is_on: bool
    evidence: str


def readiness(plugins: Iterable[Plugin], has_val: bool, seed: int | None) -> list[Readiness]:
    """What the planned run has of what a long one needs."""
    names = [plugin.name for plugin in plugins]
    return [
        _plugin("checkpoints", names, ["checkpoint"], "-p checkpoint, which saves and resumes"),
        Readiness("validation", has_val, "a loader of val is given" if has_val else "pass held-out samples as val"),
        _plugin("logging", names, ["tensorboard", "jsonl", "wandb", "mlflow", "csv"], "-p jsonl -p tensorboard"),
        Readiness("reproducibility", seed is not None, f"seed={seed}" if seed is not None else "set a seed"),
        _plugin("failure detection", names, ["guard", "anomaly"], "-p guard, which stops before a NaN is trained on"),
    ]


def _plugin(what: str, names: list[str], wanted: list[str], cure: str) -> Readiness:
    found = [name for name in wanted if name in names]
    return Readiness(what, bool(found), f"by {', '.join(found)}" if found else f"add {cure}")


def planned(trainer: dict[str, Any]) -> dict[str, Any]:
    """The settings of the planned run: the arguments of a Trainer over those of its recipe."""
    recipe = trainer.get("recipe")
    if isinstance(recipe, (str, Path)):
        recipe = load_unbuilt(recipe, frozenset())
    return {**(recipe.trainer if recipe is not None else {}), **trainer}
