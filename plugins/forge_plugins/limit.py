"""Short epochs: only some batches of each loader."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import forge
from forge.data.accumulation_windows import length_of
from forge.data.limited import Limited
from forge.errors import ForgeError, RecipeError

SMOKE = 2
"""Batches of each stage in a smoke run."""


class Limit(forge.Plugin):
    """Use only some batches of each loader: for a quick look, or to see whether a model can learn a few by heart.

    A whole number is that many batches, a fraction up to 1.0 that share of the loader: `train=100` ends every epoch
    after 100 batches, `val=0.1` validates on a tenth, `val=0` not at all. The order of the data stays the same, so a
    shuffled loader gives other batches in every epoch, and a validation the same ones every time.

    `overfit=1` trains on the first batch of the first epoch again and again, `overfit=4` on the first four,
    augmentation included. A model that cannot bring the training loss of a batch close to zero has a mistake in it:
    `forge doctor` trains on one batch in the same way, with the same random numbers each time, and looks for the
    cause. Validation stays as it is, on the batches of val, as with `overfit_batches` of Lightning; it says nothing
    then, and `val=0` leaves it out. Data that the model makes (`Rollouts`, `Replay`) are made once then, and stay;
    with `train` a collection is made for every short epoch.

    When to use it: while writing a task. `forge fit --smoke` and `Trainer(smoke=True)` run two batches of everything
    and keep nothing.

    Together with: the limits are part of the run, and `--resume` refuses others. An epoch ends after its last batch,
    so `1 epoch` in an interval means a short one.

    ::

        forge fit quickstart -p limit limit.train=10 limit.val=0.5
        forge fit quickstart -p limit limit.overfit=1 limit.val=0 trainer.max_epochs=50
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        train: int | float | None = None
        "Batches of an epoch, or a share of them; null: all."
        val: int | float | None = None
        "Batches of a validation, or a share of them; 0: a fit does not validate."
        test: int | float | None = None
        "Batches of a test, or a share of them."
        predict: int | float | None = None
        "Batches to predict, or a share of them."
        overfit: int | float | None = None
        "Train on this many batches of the first epoch, or a share of them, again and again."

    config: Config
    provides = ("limit",)

    @classmethod
    def for_setting(cls, setting: str, value: Any) -> dict[str, Any]:
        return {"train": SMOKE, "val": SMOKE, "test": SMOKE, "predict": SMOKE}

    def __init__(self, *first: int | float, **values: int | float):
        super().__init__(*first, **values)
        config = self.config
        for name in ("train", "val", "test", "predict", "overfit"):
            value = getattr(config, name)
            least = 0 if name == "val" else 1
            if value is not None and not (0 < value <= 1 if isinstance(value, float) else value >= least):
                raise RecipeError(
                    f"limit.{name} is {value!r}. Write batches as a whole number of at least {least}, or a share of "
                    "the loader above 0 and up to 1.0."
                )
        if config.train is not None and config.overfit is not None:
            raise RecipeError("limit.train and limit.overfit both say what to train on: leave one out.")

    @forge.hookimpl(wrapper=True)
    def forge_build_loader(self, trainer: forge.Run, stage: str) -> Generator[None, Any, Any]:
        built = yield
        again = stage == "train" and self.config.overfit is not None
        limit = self.config.overfit if again else getattr(self.config, stage)
        if built is None or limit is None:
            return built
        if limit == 0:
            if trainer.verb == "fit":
                return None
            raise ForgeError("limit.val is 0, so nothing is left to validate: set it to a number of batches.")
        if isinstance(built, dict):
            return {name: shortened(loader, limit, again, f"{stage}/{name}") for name, loader in built.items()}
        return shortened(built, limit, again, stage)


def shortened(loader: Any, limit: int | float, again: bool, label: str) -> Any:
    """Return the loader with this many batches, or this share of them; itself if it has no more."""
    if not hasattr(loader, "__iter__"):
        return loader  # refused by name later
    length = length_of(loader)
    if isinstance(limit, float):
        if length is None:
            raise ForgeError(
                f"limit: {limit:g} of the {label} loader is unknown, because it has no length. Write a number of "
                "batches."
            )
        limit = max(1, math.floor(limit * length))
    return loader if length is not None and limit >= length and not again else Limited(loader, limit, again)
