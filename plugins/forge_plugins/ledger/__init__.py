"""The cost of each plugin."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from pluggy import HookImpl

import forge
from forge.errors import StackError
from forge.util.files import atomic_write
from forge_plugins.ledger import cost_report
from forge_plugins.ledger.account import Account, Mark
from forge_plugins.ledger.audit import Audit
from forge_plugins.ledger.timers import Function, Timers

logger = logging.getLogger("forge")


class Ledger(forge.Plugin):
    """Measure the cost of every plugin, hook by hook, in µs per update and as a share of the update.

    When to use it: to find a slow plugin, or a line that makes the host wait for the device. It costs less than a µs
    per timed call, two for a wrapper. `forge plan RECIPE --measure` prints the same table after a few updates, without
    a full run.

    What you see: at every log, `ledger/NAME` is the cost of the plugin NAME in µs per update, and `ledger/total_share`
    the share of all plugins together. At the end of a fit the whole table is logged and written to RUN/ledger.json.

    Each implementation is timed where it runs. The code of a wrapper counts before and after its yield; calls of other
    plugins count as theirs. The cost of timing itself is measured at the start and subtracted. An update lasts from
    boundary to boundary, without the wait for data and without validations; logs, checkpoints and the work of plugins
    in validations are spread over the updates. The first update is a warm-up and is not counted. A plugin that owns an
    action (a loss scaler's backward) is listed separately, because its time includes the work itself.

    On a CUDA device these are times of the host; work that a plugin launches on the device is not included. The sync
    audit names each line, with its plugin and hook, where a plugin or the task makes the host wait for the device:
    after the first log interval, in the table, and as `ledger/syncs_per_update`. Reads that belong to a log, a
    validation or a checkpoint do not count. The audit uses torch's sync debug mode (`.item()`, `.cpu()`, `nonzero` and
    similar), and detects `torch.cuda.synchronize()`; waiting for an event is not reported.

    ::

        forge fit quickstart -p ledger trainer.max_epochs=2
        forge plan quickstart --measure
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        audit: bool = True
        "On a CUDA device: name every line that makes the host wait for the device."

    config: Config
    observer = True
    effects = ("files",)
    provides = ("hook_costs",)
    charts = {
        "plugin ledger/each plugin, in µs per update": r"ledger/(?!total_share$|syncs_per_update$).+",
        "plugin ledger/all plugins, as a share of an update": r"ledger/total_share",
        "plugin ledger/times that the host waits for the device, per update": r"ledger/syncs_per_update",
    }

    def __init__(self, *first: bool, **values: Any):
        super().__init__(*first, **values)
        self.report: dict[str, Any] | None = None
        "The results of the last fit, as plain data: the content of RUN/ledger.json."
        self._forget()

    def _forget(self) -> None:
        """Reset the state of one run."""
        self._account: Account | None = None
        self._audit: Audit | None = None
        self._interval: Mark | None = None
        self._syncs_before = 0
        self._warned_of_syncs = False
        self._last: Mark | None = None
        "The end of an update that may be the run's last."
        self._ended = 0
        "The end time of the latest update."
        self._started = False

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        self._forget()
        self.report = None
        if trainer.verb != "fit":
            return
        if trainer.trace is not None:
            logger.warning("ledger measures nothing while every call is traced. Run without --trace.")
            return
        other = getattr(trainer.instrument, "__self__", None)
        if trainer.instrument is not None and not isinstance(other, Ledger):
            raise StackError("ledger needs trainer.instrument, but it is set already. Set it to None.")
        self._account = Account(Timers(self))
        self._audit = Audit() if self.config.audit else None
        trainer.instrument = self._instrument

    def _instrument(self, hook: str, impl: HookImpl) -> Function:
        assert self._account is not None
        if self._audit is not None:
            self._audit.know(hook, impl)
        return self._account.timers.instrument(hook, impl)

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        if trainer.env.device.type != "cuda":
            self._audit = None
        if self._account is not None:
            self._account.timers.calibrate()
            self._started = True

    @forge.hookimpl(wrapper=True)
    def forge_step_end(self, step: forge.Step) -> Generator[None, Any, Any]:
        """Count after the yield, when all other plugins have run their step_end."""
        result = yield
        account = self._account
        if account is not None and account.first is not None:
            account.update(step.data_wait)
            if step.ends_interval:
                self._record(step, account)
        return result

    def _record(self, step: forge.Step, account: Account) -> None:
        """Record the costs of the interval."""
        assert self._interval is not None
        now = account.mark()
        period, self._interval = account.between(self._interval, now), now
        costs = dict.fromkeys((cell.plugin for cell in account.timers.cells), 0.0)
        for row in period["rows"]:
            costs[row["plugin"]] += row["us_per_update"] if row["is_cost"] else 0.0
        for plugin, spent in costs.items():
            step.record(f"ledger/{plugin}", spent)
        step.record("ledger/total_share", period["total_share"])
        if self._audit is not None and self._audit.listening:
            self._record_syncs(step, account, self._audit, period["updates"])

    def _record_syncs(self, step: forge.Step, account: Account, audit: Audit, updates: int) -> None:
        found = audit.unexpected()
        step.record("ledger/syncs_per_update", (found - self._syncs_before) / updates)
        self._syncs_before = found
        if found and not self._warned_of_syncs:
            self._warned_of_syncs = True
            places = [
                cost_report.sync_text(row) for row in audit.rows(account.counts["updates"]) if not row["expected"]
            ]
            logger.warning("ledger: the host waits for the device: %s", "; ".join(places))

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self) -> Generator[None, Any, Any]:
        account = self._account
        if account is None or account.first is None:
            return (yield)
        before = account.mark()
        try:
            return (yield)
        finally:
            account.evaluation(before)

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run, step: forge.Step) -> None:
        account = self._account
        if account is None:
            return
        if account.first is None:
            account.begin()
            self._interval = account.first
            if self._audit is not None:
                self._audit.start()
        elif step.ends_epoch or trainer.progress.update == trainer.max_updates or "stop" in trainer.requests.open:
            self._last = account.mark()
        self._ended = account.timers.clock()

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        if getattr(trainer.instrument, "__self__", None) is self:
            trainer.instrument = None
        account, audit = self._account, self._audit
        if audit is not None:
            audit.stop()
        if account is None or not self._started:
            return
        self._account = None
        self.report = self._close(account, audit)
        if trainer.env.is_main:
            logger.info("ledger: %s", self.told())
            self._write(trainer, self.report)

    def told(self) -> str:
        """Return the results of the last fit as text, for the log and for `forge plan --measure`."""
        return cost_report.as_text(self.report or {"updates": 0})

    # -- the end ------------------------------------------------------------------------------------------------------

    def _close(self, account: Account, audit: Audit | None) -> dict[str, Any]:
        """Return the report from the end of the first update to the end of the last."""
        updates = account.counts["updates"]
        end = self._last if self._last is not None and self._last["updates"] == updates else None
        report: dict[str, Any] = {"updates": 0, "rows": []}
        if account.first is not None and updates:
            stop = end or account.mark()
            stop["at"] = self._ended if end is None else end["at"]
            report = account.between(account.first, stop)
        report["once"] = account.once(end)
        if audit is not None:
            report["syncs"] = audit.rows(updates)
            report["syncs_per_update"] = sum(sync["per_update"] for sync in report["syncs"] if not sync["expected"])
        return report

    def _write(self, trainer: forge.Run, report: dict[str, Any]) -> None:
        if trainer.run_dir is None:
            return
        try:
            with atomic_write(trainer.run_dir / "ledger.json") as beside:
                beside.write_text(json.dumps(report, indent=2) + "\n")
        except OSError as error:
            logger.error("ledger: ledger.json cannot be written: %s.", error)
