"""Readiness for a long run: what saves it, watches it and makes it repeatable, with the evidence for each."""

from __future__ import annotations

from dataclasses import dataclass

from forge.contract.plugin import Plugin
from forge.contract.run import Run


@dataclass(frozen=True, slots=True)
class Readiness:
    """One thing that a long run needs."""

    what: str
    is_on: bool
    evidence: str


def readiness(trainer: Run, has_val: bool) -> list[Readiness]:
    """What the planned run has; asked before plugins are left out of the examination."""
    plugins = {plugin.name: plugin for plugin in trainer.stack}
    return [
        _plugin("checkpoints", plugins, ["checkpoint"], "-p checkpoint saves and resumes"),
        _validation(trainer, has_val),
        _plugin("logging", plugins, ["tensorboard", "jsonl", "wandb", "mlflow", "csv"], "-p jsonl -p tensorboard"),
        _seed(trainer),
        _plugin("failure detection", plugins, ["guard", "anomaly"], "-p guard stops before a NaN is trained on"),
    ]


def _plugin(what: str, plugins: dict[str, Plugin], names: list[str], cure: str) -> Readiness:
    found = [name for name in names if name in plugins]
    return Readiness(what, bool(found), f"by {', '.join(found)}" if found else f"add {cure}")


def _validation(trainer: Run, has_val: bool) -> Readiness:
    if not has_val:
        return Readiness("validation", False, "pass a loader of held-out samples as val")
    every = trainer.validate_every
    return Readiness("validation", every is not None, f"every {every}" if every is not None else "set validate_every")


def _seed(trainer: Run) -> Readiness:
    evidence = f"seed={trainer.seed}" if trainer.seed is not None else "set a seed"
    return Readiness("reproducibility", trainer.seed is not None, evidence)
