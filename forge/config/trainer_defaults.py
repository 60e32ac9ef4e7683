"""Settings: the Trainer's options, the same in Python, in a recipe's `trainer` section and on the command line."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

from forge import options, registry
from forge.errors import ForgeError, did_you_mean
from forge.progress import Interval
from forge.util.files import check_name

CARRIED = ("max_time", "min_epochs", "min_updates", "validate_first", "smoke")
"""Settings that a plugin carries out, found by the entry point of that name in `forge.settings`."""
FOLDERS = ("run_dir", "resume")
"""Settings that name folders of this machine: given in code they stay out of the recipe that a run writes."""


class GivenSettings(TypedDict, total=False):
    """The settings that `forge.Trainer(...)` takes by name; `Settings` describes them."""

    max_epochs: int | None
    max_updates: int | None
    seed: int | None
    run_dir: str | Path | Literal[False] | None
    device: str
    mesh: dict[str, int] | None
    validate_every: str | None
    log_every: int
    resume: str | Path | bool | None
    deterministic: bool
    allow_inexact: bool
    group_access: bool
    max_time: str | int | None
    min_epochs: int | None
    min_updates: int | None
    validate_first: bool | None
    smoke: bool


@dataclass(kw_only=True, slots=True)
class Settings:
    """How long, where and how often: everything about a run that is neither task, data nor plugin."""

    max_epochs: int | None = None
    "Epochs to train for."
    max_updates: int | None = None
    "Optimizer updates to train for; with max_epochs too, whichever comes first."
    seed: int | None = None
    "Seed of the run: initial weights, data order, dropout, augmentation. None touches no generator."
    run_dir: str | Path | Literal[False] | None = None
    "Folder for the run; None makes a new one under runs/, False writes nothing."
    device: str = "auto"
    'Where to run: "auto" (CUDA, MPS, then CPU), "cpu", "cuda", "cuda:1", "mps".'
    mesh: dict[str, int] | None = None
    "Processes along each axis that a plugin divides along: {data: 2, shard: 4, tensor: 2}; None: by plugins' options."
    validate_every: str | None = "1 epoch"
    "How often a fit validates."
    log_every: int = 50
    "Updates between two logs."
    resume: str | Path | bool | None = None
    'Continue a run: "auto" for the newest, or a run folder or checkpoint.'
    deterministic: bool = False
    "Allow only deterministic algorithms."
    allow_inexact: bool = False
    "Allow what cannot be continued exactly, with a warning."
    group_access: bool = False
    "Let the group of a new run folder read and continue the run; by default only its owner can."
    max_time: str | int | None = None
    "Time after which the run ends: 00:10:00, 10 min, 2 h; then neither max_epochs nor max_updates is needed."
    min_epochs: int | None = None
    "Epochs before which neither a plugin nor max_time ends the run."
    min_updates: int | None = None
    "Updates before which neither a plugin nor max_time ends the run."
    validate_first: bool | None = None
    "Validate before the first update: True on all data; False not even on one batch, as the recipe default does."
    smoke: bool = False
    "Run two batches of everything, and keep nothing: to see whether it runs at all."

    def __post_init__(self) -> None:
        for name in ("max_epochs", "max_updates", "min_epochs", "min_updates", "log_every", "seed"):
            value, ends = getattr(self, name), options.WORD if name == "seed" else (1,)
            if value is not None:
                setattr(self, name, options.whole(value, name, *ends))
        for axis, size in (self.mesh or {}).items():
            options.whole(size, f"mesh.{axis}", 1)
        for path in (self.run_dir, self.resume):
            if isinstance(path, (str, Path)):
                check_name(path)
        self.device = str(self.device)
        kept = {"run_dir": self.run_dir or None, "resume": self.resume or None}
        if self.smoke and any(kept.values()):
            given = next(name for name, value in kept.items() if value)
            raise ForgeError(f"smoke keeps nothing, so there is no {given}: leave {given} out, or smoke.")

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """Check names and values, and build the settings."""
        known = [field.name for field in fields(cls)]
        for name in (name for name in given if name not in known):
            hint = registry.hint("Trainer", name) or did_you_mean(name, [*known, "recipe", "plugins"])
            raise TypeError(f"forge.Trainer takes no argument {name!r}.{hint}")
        return cls(**given)

    def as_data(self) -> dict[str, Any]:
        """Return the settings that the run card shows."""
        return {
            "max_epochs": self.max_epochs,
            "max_updates": self.max_updates,
            "seed": self.seed,
            "device": self.device,
            "validate_every": str(Interval(self.validate_every)) if self.validate_every else None,
            "log_every": self.log_every,
            "deterministic": self.deterministic,
            "group_access": self.group_access,
            **{name: getattr(self, name) for name in ("mesh", *CARRIED) if getattr(self, name)},
        }


def signature(**more: str) -> inspect.Signature:
    """Return the signature of a function that takes every setting by name, and `more` by name and type."""
    named = inspect.Parameter.KEYWORD_ONLY
    settings = [inspect.Parameter(f.name, named, default=f.default, annotation=f.type) for f in fields(Settings)]
    others = [inspect.Parameter(name, named, default=None, annotation=kind) for name, kind in more.items()]
    return inspect.Signature([*settings, *others])
