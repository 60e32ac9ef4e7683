"""Early stopping."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import forge
from forge import options
from forge.diagnose.validations import warn_of_none_planned, warn_of_nothing_compared
from forge.errors import NegativeVerdict, StackError
from forge_plugins.early_stop.stop_rule import StopRule


class EarlyStop(forge.Plugin):
    """Stop the run when a metric has not improved for a while, has reached a target, or has diverged.

    After every validation of a fit the metric is compared with the best value so far; it has improved if it is better
    by more than `min_delta`. After `patience` validations in a row without improvement the run stops. NaN and infinity
    never count as an improvement. A metric that the validation does not return is refused, with a list of those that it
    does.

    A training metric can be watched too, and needs no validation: `monitor=train/loss_epoch` compares the mean of every
    epoch, `train/loss` every log. `patience` counts what is compared.

    `rules` is a list of several such rules, each with the options of its own and otherwise those of the plugin; the
    first that is due stops the run.

    `divergence_threshold` stops the run as soon as the metric is worse than it, or not finite.

    `floor` is for pipelines: a metric that falls below it ends the run as failed, with exit code 1, right after that
    validation; nothing more is saved or exported. It is a number that the metric must keep once it has reached it, or a
    share of the run's own best: with `floor=20%` an accuracy may be a fifth below the best so far, and a loss a fifth
    above it. NaN and infinity are below every floor. A run that ends below a number, without having reached it, has
    failed too; with `after`, every validation from that point on must reach it.

    When to use it: if you do not know how many epochs a run needs. The weights at the end are those of the last update;
    to keep those of the best validation, set `checkpoint.best`.

    What you see: the reason in the log and in `FitResult.stop_reason`. The state is saved as at every stop.

    Together with: with `ema` or `swa` the averaged weights are validated, and so watched. The best value and the count
    are saved with the run. A stopped run that is resumed does not train further, unless it gets a larger `patience` or
    another `target`.

    ::

        forge fit quickstart -p early_stop
        forge fit quickstart -p early_stop early_stop.monitor=train/loss_epoch early_stop.divergence_threshold=10
        forge fit quickstart -p early_stop "early_stop.rules=[{patience: 5}, {monitor: val/accuracy, mode: max}]"
        forge fit quickstart -p early_stop early_stop.monitor=val/accuracy early_stop.mode=max early_stop.patience=5
        forge fit quickstart -p early_stop early_stop.floor=50%
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        monitor: str = "val/loss"
        "The metric to monitor, by its logged name: val/loss, train/loss_epoch."
        mode: Literal["min", "max"] | None = None
        "Whether smaller (min) or larger (max) is better. null: min, refused for a name such as accuracy."
        patience: int = 3
        "Comparisons in a row without improvement after which the run stops."
        min_delta: float = 0.0
        "Smallest difference from the best value that counts as an improvement."
        target: float | None = None
        "Stop as soon as the metric reaches this value."
        divergence_threshold: float | None = None
        "Stop as soon as the metric is worse than this value, or not finite."
        floor: float | str | None = None
        "Fail with exit code 1 if the metric falls below this value, or by this share of its best: 0.8, 20%."
        after: str | None = None
        "Ignore what comes before this point: 1000 updates, 2 epochs."
        rules: list[dict[str, Any]] | None = None
        "Several rules, each a mapping of the options above; what a rule does not set is taken from above."

    config: Config
    provides = ("early_stop",)
    cures = {"endless": "the plugin {name}"}

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        known = [option for option in options.of_config(EarlyStop.Config) if option.name != "rules"]
        own = [options.check(known, rule, f"early_stop.rules[{n}]") for n, rule in enumerate(self.config.rules or ())]
        self._rules = [StopRule(replace(self.config, rules=None, **each)) for each in own or [{}]]
        if all(rule.config.floor is None for rule in self._rules):
            self.forge_boundary = None  # pyright: ignore[reportAttributeAccessIssue]
        if all(rule.of_validation for rule in self._rules):
            self.forge_log = None  # pyright: ignore[reportAttributeAccessIssue]
        self._failed = False

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._failed = False
        for rule in self._rules:
            rule.begin()
        watching = [rule.config.monitor for rule in self._rules if rule.of_validation]
        if trainer.verb != "fit" or not watching:
            return
        if "val" not in trainer.loaders:
            raise StackError(
                f"early_stop watches {watching[0]!r}, but this fit has no val loader. Pass one, watch a training "
                "metric such as train/loss_epoch, or remove early_stop."
            )
        warn_of_none_planned(trainer, "early_stop")

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self, trainer: forge.Run, stage: str) -> Generator[None, Any, Any]:
        metrics = yield
        if trainer.verb == "fit" and stage == "val":
            for rule in self._rules:
                if rule.of_validation:
                    rule.compare(trainer, metrics)
            self._stop_if_due(trainer)
        return metrics

    @forge.hookimpl
    def forge_log(self, trainer: forge.Run, metrics: Mapping[str, Any]) -> None:
        if trainer.verb != "fit":
            return
        rules = [rule for rule in self._rules if not rule.of_validation]
        for rule in rules:
            if rule.config.monitor in metrics:
                rule.compare(trainer, metrics)
            elif trainer.progress.epoch > 1:
                rule.refuse_unknown(trainer.metrics)
        if any(rule.config.monitor in metrics for rule in rules):
            self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: forge.Run) -> None:
        """Request a stop for the first rule that is due; the metrics are equal on all ranks."""
        reason = next((reason for rule in self._rules if (reason := rule.reason())), "")
        if reason:
            trainer.request_stop(reason, everywhere=True, by=self.name)

    @forge.hookimpl
    def forge_boundary(self) -> None:
        verdict = next((rule.verdict for rule in self._rules if rule.verdict), "")
        if verdict:  # only now, so that the validation is logged
            raise NegativeVerdict(f"{verdict}. The run ends as failed; nothing more is saved.")

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._failed = True

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        if trainer.verb != "fit" or self._failed:
            return
        for rule in self._rules:
            if rule.last is None:
                warn_of_nothing_compared(trainer, "early_stop", rule.why_nothing())
            elif not trainer.settings.get("smoke"):  # two batches say nothing
                rule.refuse_end_below_floor()

    # -- state --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        states = [rule.state_dict() for rule in self._rules]
        return {"rules": states} if self.config.rules else states[0]

    @forge.hookimpl
    def forge_load_state_dict(self, trainer: forge.Run, state: dict[str, Any]) -> None:
        saved = state.get("rules", [state])
        for rule in self._rules:
            rule.begin()
            rule.load_state_dict(saved)
        self._stop_if_due(trainer)
