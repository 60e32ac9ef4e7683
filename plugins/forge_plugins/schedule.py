"""Learning-rate schedules by name."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import forge
from forge.contract.run_lengths import check_length, updates_of
from forge.errors import ForgeError, RecipeError
from forge.optim import schedule_stepping
from forge.optim.optimizers import Optimizers

Factor = Callable[[int], float]
"""Maps the updates done by an optimizer to the factor of its learning rate for the next one."""

USES = {
    "cosine": {"warmup", "min_ratio"},
    "linear": {"warmup", "min_ratio"},
    "constant": {"warmup"},
    "step": {"warmup", "min_ratio", "step_size", "gamma"},
    "one_cycle": {"warmup", "min_ratio"},
    "task": set(),
}
"""The options that each kind uses."""


class Schedule(forge.Plugin):
    """Change the learning rate over the run: warm up, then decay.

    The optimizer's own lr (of each parameter group) is the peak. With N planned updates and W of them warm-up, update i
    (from 0) uses the peak times a factor:

    - warm-up, i < W: (i + 1) / W. The first update is not 0, the W-th has the peak.
      Without warm-up the first update has the peak.
    - cosine, linear: from 1 at the update of the peak to min_ratio at update N, one
      after the last, so that no update has lr 0. Without warm-up they are torch's
      CosineAnnealingLR(T_max=N) and LinearLR(total_iters=N).
    - constant: 1.
    - step: gamma ** (i // step_size), not below min_ratio; i counts from the first
      update of the run, warm-up included.
    - one_cycle: torch's OneCycleLR with each group's lr as its maximum. From 1/25
      up to 1 at the end of the warm-up (if 0: after 30 % of the run), down to
      min_ratio (if 0: 1/250,000) in the last update. Momentum or beta1, if the
      optimizer uses one, goes from 0.95 to 0.85 and back.
    - task: the schedule that configure_optimizers returned.

    When to use it: for nearly every run; `cosine` with a short warm-up is a good start.

    What you see: `lr` in every log.

    The schedule counts updates, not micro-batches. A skipped update does not count. With several optimizers each has
    its own schedule, which moves when that optimizer steps.

    Together with: under `one_cycle`, which changes momentum or betas, `cuda_graph` leaves the optimizer's step outside
    of the graph.

    ::

        forge fit quickstart schedule.kind=one_cycle schedule.warmup=4
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        kind: Literal["cosine", "linear", "constant", "step", "one_cycle", "task"] = "cosine"
        "Shape after the warm-up; task keeps the schedule that configure_optimizers returned."
        warmup: int | float | str = 0
        "Length of the warm-up: updates (500), a share of the run (0.05), '500 updates' or '1 epoch'."
        min_ratio: float = 0.0
        "The lr at the end as a share of the peak."
        step_size: int | str | None = None
        "step: time between two drops: updates (1000), '1000 updates' or '30 epochs'."
        gamma: float = 0.1
        "step: factor of the lr at each drop."

    config: Config
    provides = ("schedule",)
    example = {"warmup": 2}

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        self._check_options()
        self._warn_of_unused(values)

    @forge.hookimpl(wrapper=True)
    def forge_build_optimizers(self, trainer: forge.Run) -> Generator[None, Optimizers, Optimizers]:
        built = yield
        returned = [type(item.schedule).__name__ for entry in built.entries.values() for item in entry.schedules]
        self._refuse_none_or_two(returned, type(trainer.task).__name__)
        if self.config.kind != "task":
            make = self._recipe_for(trainer)
            for name, entry in built.entries.items():
                built.add_schedule(name, schedule_stepping.ScheduledLR(make(entry.optimizer)))
        return built

    # -- what to build ------------------------------------------------------------------------------------------------

    def _recipe_for(self, trainer: forge.Run) -> Callable[[Optimizer], LRScheduler]:
        """Return the function that makes a schedule for an optimizer of this run."""
        config, planned = self.config, trainer.planned_updates
        if planned is None and (config.kind in ("cosine", "linear", "one_cycle") or _is_share(config.warmup)):
            what = config.kind if not _is_share(config.warmup) else f"a warm-up of {config.warmup:g} of the run"
            raise ForgeError(
                f"schedule: {what} needs the number of updates of the run. Set max_updates, or use a train loader "
                "with a length and max_epochs."
            )
        warmup = updates_of(config.warmup, trainer, "schedule.warmup")
        if planned is not None and warmup > planned and not trainer.settings.get("smoke"):
            warnings.warn(
                f"schedule.warmup is {warmup} updates, but the run has only {planned}: the peak is never reached.",
                stacklevel=2,
            )
        if config.kind == "one_cycle":
            assert planned is not None
            return lambda optimizer: one_cycle(optimizer, planned, warmup, config.min_ratio)
        factor = with_warmup(self._decay(trainer, max(warmup - 1, 0)), warmup)
        return lambda optimizer: LambdaLR(optimizer, factor)

    def _decay(self, trainer: forge.Run, peak: int) -> Factor:
        """Return the factor after the warm-up, whose last update was `peak`."""
        config = self.config
        if config.kind == "constant":
            return lambda i: 1.0
        if config.kind == "step":
            assert config.step_size is not None
            size = updates_of(config.step_size, trainer, "schedule.step_size")
            if size <= peak:
                raise RecipeError(
                    f"schedule: the first drop, after {size} updates, is inside the warm-up of {peak + 1}."
                )
            return lambda i: max(config.gamma ** (i // size), config.min_ratio)
        assert trainer.planned_updates is not None
        return falling(config.kind, peak, trainer.planned_updates, config.min_ratio)

    # -- what to refuse -----------------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        config = self.config
        check_length(config.warmup, "schedule.warmup")
        if not 0 <= config.min_ratio <= 1:
            raise RecipeError(
                f"schedule.min_ratio is {config.min_ratio:g}; it must be a share of the peak, from 0 to 1."
            )
        if config.gamma <= 0:
            raise RecipeError(f"schedule.gamma is {config.gamma:g}; it must be above 0.")
        if isinstance(config.step_size, str):
            check_length(config.step_size, "schedule.step_size")
        elif config.step_size is not None and config.step_size < 1:
            raise RecipeError(f"schedule.step_size is {config.step_size}; it must be at least 1.")
        if config.kind == "step" and config.step_size is None:
            raise RecipeError("schedule: kind 'step' needs a step_size: updates (1000), or an interval ('30 epochs').")

    def _warn_of_unused(self, given: dict[str, Any]) -> None:
        """Only warn: the options of a recipe may remain while its kind is overridden."""
        default = type(self.config)()
        meant = USES[self.config.kind] | {"kind"}
        unused = [f"{k}={v!r}" for k, v in given.items() if k not in meant and v != getattr(default, k)]
        if unused:
            warnings.warn(f"schedule: kind {self.config.kind!r} does not use {', '.join(unused)}.", stacklevel=3)

    def _refuse_none_or_two(self, returned: list[str], task: str) -> None:
        kind = self.config.kind
        if kind == "task" and not returned:
            raise ForgeError(
                f"schedule: kind 'task' keeps the schedule of {task}.configure_optimizers, but it returned none. "
                "Return (optimizer, schedule), or pick another kind."
            )
        if kind != "task" and returned:
            raise ForgeError(
                f"Two schedules for one optimizer: {task}.configure_optimizers returned {', '.join(returned)}, and the "
                f"plugin {self.name!r} is set to {kind!r}. Remove one, or set {self.name}.kind=task to keep the task's."
            )


# ---------------------------------------------------------------------------------------------------------------------
# Shapes: pure functions of the updates done, so a restored run continues exactly.


def with_warmup(decay: Factor, warmup: int) -> Factor:
    """Rise in equal steps to 1 at update `warmup - 1`, then follow `decay`."""

    def factor(i: int) -> float:
        return (i + 1) / warmup if i < warmup else decay(i)

    return factor


def falling(kind: str, peak: int, planned: int, lowest: float) -> Factor:
    """From 1 at update `peak` to `lowest` at update `planned`, and no further."""

    def factor(i: int) -> float:
        share = (i - peak) / (planned - peak) if i < planned else 1.0
        left = (1 + math.cos(math.pi * share)) / 2 if kind == "cosine" else 1 - share
        return lowest + (1 - lowest) * left

    return factor


def one_cycle(optimizer: Optimizer, planned: int, warmup: int, lowest: float) -> OneCycleLR:
    """torch's OneCycleLR below each group's learning rate."""
    start = 25.0  # torch's default: the first update has 1/25 of the peak
    in_use = all(group.get("momentum", 0) > 0 or "betas" in group for group in optimizer.param_groups)
    return OneCycleLR(
        optimizer,
        max_lr=[float(group["lr"]) for group in optimizer.param_groups],
        total_steps=planned,
        # torch's peak is at update pct_start * planned - 1, and it divides by the numbers of updates before and after
        pct_start=min(max(warmup, 2), planned - 1) / planned if warmup and planned > 2 else 0.3,
        cycle_momentum=in_use,
        div_factor=start,
        final_div_factor=1 / (start * lowest) if lowest else 1e4,
    )


def _is_share(warmup: int | float | str) -> bool:
    return isinstance(warmup, float) and warmup > 0
