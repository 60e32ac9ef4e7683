"""Spans: where the time of a run goes."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import forge
from forge.errors import RecipeError
from forge.runs.folder import RunFolder
from forge.spans import goodput, record, told
from forge.spans.device import DeviceTimes
from forge.spans.file import SpanFile, path_of
from forge.spans.ranks import SlowRanks
from forge.spans.verdict import Verdict
from forge.torch_internals import dynamo_is_loaded
from forge.util.files import atomic_write
from forge_plugins import torch_internals as internals
from forge_plugins.spans.limits import OFTEN, batches_of, limit_of
from forge_plugins.spans.syncs import NamedSyncs
from forge_plugins.spans.updates import UpdateRates
from forge_plugins.spans.waiting import WaitingGpu

logger = logging.getLogger("forge")

EVERY, SHOWN_EVERY = 10.0, 60.0
"""Seconds between two writes of RUN/spans.json, and between two texts for the loggers."""


class Spans(forge.Plugin):
    """Account for the time of a run: the share in updates that count, and where the rest went.

    When to use it: always; it is part of the recipe `default`, and costs about a µs per update.

    What you see: the card of the run, `forge runs`, reports and loggers (a text at a checkpoint, once a minute at most)
    have the share of the wall time that was spent in updates that count, over all attempts of the run: goodput. The
    rest is the start of each attempt, compiling, waiting for data, validation, checkpoints (the time that training
    waits for them), logs, stalls, and work that was lost: what an attempt did after the checkpoint that the next one
    went on from, or that a rewind went back to. The parts add up to the wall time of all attempts. Time between
    attempts, as in a queue, is told beside it. On a GPU that waits for the host in the first updates, a line says so,
    with what capturing the update would gain.

    An attempt begins when its fit is configured, so the import of torch is not in it, and its first update belongs to
    its start. A stall is an update that takes ten times as long as usual, and over a second: the excess counts.
    Compiling is what torch reports of it. Times are the host's, on rank 0; a device that is behind is waited for in a
    checkpoint or a log. RUN/spans.json is written every ten seconds, at checkpoints and at the end: of a killed attempt
    up to ten seconds are missing, and count as time between attempts.

    With `hooks`, each implementation of each hook is timed where it runs, without what it calls of others: every log
    has `costs/NAME`, the cost of the plugin NAME in µs per update, and `costs/plugins_share`; the whole table, with the
    phases of an update (data, to_device, forward, backward, optimizer), is logged at the end and is part of
    RUN/spans.json and the report. `forge plan RECIPE --measure` prints it after a few updates. A plugin that owns an
    action is listed apart, because its time includes the work itself. On a CUDA device each line that makes the host
    wait in an update is named, with the plugin or task that it runs for (`.item()`, `.cpu()`, `nonzero`, by torch's
    sync debug mode, and `torch.cuda.synchronize()`), and `costs/syncs_per_update` counts them. It costs less than a µs
    for each call.

    With `rates`, every log has `rates/samples_per_s`, `step_ms_p50`, `_p95` and `_max`, and `data_wait_share`: the
    share of time in which the host waited for the loader. A step lasts from the start of that wait to its end; logs,
    validations and checkpoints are not included. On CUDA the device records the time at both ends, and the host reads
    it later: nothing waits, and a log covers the updates that are finished by then. `tokens_per_s` is logged if a batch
    begins with a two-dimensional tensor of integers; if the task defines `num_items`, its rate has that name then,
    otherwise `items_per_s`. `rates/tflops` is the work per second, in 10¹² FLOPs, and `rates/mfu` is FLOP/s ÷ the
    device's peak: the data sheet's value for dense products in the type that most of the work uses, or `peak`. FLOPs
    are counted with the formulas of torch's flop counter in the second update, and assumed to grow with the number of
    samples. Recomputation counts, because the device does compute it. Inside compiled code nothing can be counted, so
    forward and backward run once on a copy of the task without values; if that does not work, the log says why. The
    first two updates are not in the rates. On CUDA `rates/peak_gb` (10⁹ bytes) is the most that torch allocated since
    the run began; what it consists of, `profiler.memory=true` tells.

    On several ranks, with `hooks`, `rates/slowest_rank` is the rank that the others wait for, `straggler_share` the
    share of an update for which it holds up the median rank, and `waited_ms_rank0`, `_rank1`, … the time that each rank
    waits for it (up to 16 ranks), by each rank's own spans: data, to_device, forward and optimizer. A rank that costs a
    tenth of an update or more at three logs in a row is named in a warning, with its host and phase.

    ::

        forge fit quickstart spans.rates=true trainer.max_epochs=3
        forge fit quickstart spans.hooks=true trainer.max_epochs=2
        forge fit quickstart -p spans trainer.max_epochs=2
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        hooks: bool = False
        "Record every implementation of every hook: phases, the cost of each plugin, syncs on a CUDA device."
        rates: bool = False
        "Log samples, tokens and FLOPs a second, step times, and the share of waiting for data, at every log."
        peak: float | None = None
        "The device's peak in TFLOP/s, for MFU, instead of the table of data sheets."
        file: bool = False
        "Record hooks, and write every span to RUN/spans.jsonl, one file a rank, of 64 MiB at most."
        ranges: bool = False
        "Record hooks, and open a range of the same name for each call, which torch's profiler shows."

    config: Config
    observer = True
    effects = ("files",)
    cures = {"measure": "{name}.rates=true"}
    charts = {
        "rates/samples per second": r"rates/samples_per_s",
        "rates/tokens or items per second": r"rates/(?!samples_)\w+_per_s",
        "rates/step time, in ms": r"rates/step_ms_.+",
        "rates/share of the time that is spent waiting for data": r"rates/data_wait_share",
        "rates/rank that the others wait for": r"rates/slowest_rank",
        "rates/share of the time that the median rank waits for it": r"rates/straggler_share",
        "rates/time that each rank waits for the slowest, in ms per update": r"rates/waited_ms_rank\d+",
        "rates/TFLOP per second": r"rates/tflops",
        "rates/share of the device's peak (MFU)": r"rates/mfu",
        "rates/peak of memory, in GB": r"rates/peak_gb",
        "plugins/each plugin, in µs per update": r"costs/(?!plugins_share$|syncs_per_update$).+",
        "plugins/all plugins, as a share of an update": r"costs/plugins_share",
        "plugins/times that the host waits for the device, per update": r"costs/syncs_per_update",
    }

    def __init__(self, *first: bool, **values: Any):
        super().__init__(*first, **values)
        self._account: goodput.TimeAccount | None = None
        self.times: record.HookTimes | None = None
        "What hooks took in the last fit, if that was asked for."
        peak = self.config.peak
        if peak is not None and peak <= 0:
            raise RecipeError(f"spans.peak is {peak:g}; it must be above 0, in TFLOP/s.")
        if not self.config.rates:
            self.forge_plan_step = self.forge_step_end = None  # pyright: ignore[reportAttributeAccessIssue]
        self._records = self.config.hooks or self.config.file or self.config.ranges
        if not self.config.rates and not self._records:
            self.forge_train_step = None  # pyright: ignore[reportAttributeAccessIssue]

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        config = self.config
        self._account = self.times = self._syncs = self._ranks = None
        self._earlier: list[goodput.TimedAttempt] | None = None
        self._folder: Path | None = None
        "Where the account is written."
        self._waiting: WaitingGpu | None = None
        self._rates: UpdateRates | None = None
        self._failed, self._looks, self._batches = False, None, None
        self._file: SpanFile | None = None
        self._written = self._shown = goodput.clock()
        if trainer.verb != "fit":
            return
        self._account = goodput.TimeAccount(Compiled().seconds, trainer.instrument)
        trainer.instrument = self._account.instrument
        if self._records:
            around = torch.profiler.record_function if config.ranges else None
            self._events = DeviceTimes() if torch.cuda.is_available() else None
            self.times = record.HookTimes(self._account, self, self._events, around)
            trainer.instrument = self.times.instrument

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._waiting = WaitingGpu.of(trainer)
        self._looks = self._waiting
        if trainer.env.is_main and trainer.verb == "fit":
            self._folder = trainer.run_dir
        on_cuda = trainer.env.device.type == "cuda"
        if self.times is not None and self._events is not None and on_cuda:
            self._syncs = NamedSyncs()
            self._events.start(trainer.env.device)
        self._batches = batches_of(trainer)[0] if self.times is not None else None
        if self._batches is not None:
            self._batches.spent = torch.zeros(2, dtype=torch.float64).share_memory_()
        if self.times is not None and self.config.file and trainer.run_dir is not None:
            self._file = SpanFile(path_of(trainer.run_dir, trainer.env.rank), trainer.env.rank)
        if self.times is not None and trainer.env.world > 1:
            self._ranks = SlowRanks(trainer.env)
        if trainer.verb == "fit" and (self.config.rates or self._records):
            self._rates = UpdateRates(trainer, self.config.peak)

    @forge.hookimpl(wrapper=True)
    def forge_plan_step(self) -> Generator[None, Any, Any]:
        if self._rates is not None:
            self._rates.clock.begin()
        return (yield)

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        counting = None if self._rates is None else self._rates.counting(step)
        if counting is not None:
            with counting:
                return (yield)
        if self._rates is not None and self._rates.told and self.config.rates and step.trainer.env.is_main:
            logger.info("spans: %s", self._rates.told)
        step.trainer.switch_hooks(self, "forge_train_step", on=False)
        return (yield)

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        if self._rates is not None:
            self._rates.end(step)

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run, step: forge.Step) -> None:
        account = self._account
        if account is None:
            return
        saved = account.update(step)
        if self.times is not None:
            self._count(self.times, step)
        if self.config.rates and self._rates is not None and step.ends_interval and (found := self._rates.take()):
            trainer.publish(found)
        if saved or account.ended - self._written > EVERY:
            self._write(trainer, account, shows=saved)
        if self._looks is not None and account.usual is not None and not self._looks.look(step, account.usual):
            if text := self._looks.sentence(account.usual):
                logger.info("%s", text)
            self._looks = None

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._failed = True

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        account, self._account = self._account, None
        if account is None:
            return
        trainer.instrument = account.inner
        if self._syncs is not None:
            self._syncs.stop()
        if self._file is not None:
            self._file.close()
        if not account.attempt.marks:  # no update has ended
            return
        account.end(trainer.saved_at)
        self._write(trainer, account)
        if not self._failed and self._rates is not None:
            trainer.env.synchronize()  # the run is over, so waiting for the device is fine
        if self._rates is not None and (text := self._rates.sentence()) and trainer.env.is_main:
            logger.info("spans: %s.", text)
        if self.times is not None and trainer.env.is_main:
            logger.info("spans: %s\n%s", told.with_syncs(self.report), self.limit(trainer))
        if self._batches is not None:
            self._batches.spent = None

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _count(self, times: record.HookTimes, step: forge.Step) -> None:
        """Count an update; at the end of an interval log what each plugin costs, on average since the first update."""
        times.update(step.index)
        if not times.updates and self._syncs is not None:
            self._syncs.start()
        if self._file is not None and (step.ends_interval or len(times.ring) > record.RING // 2):
            self._file.take(times.ring)
        if not times.updates or not step.ends_interval:
            return
        report, costs = self.report, dict[str, float]()
        for row in report["rows"]:
            spent = row["us_per_update"] if row["is_cost"] else 0.0
            costs[f"costs/{row['plugin']}"] = costs.get(f"costs/{row['plugin']}", 0.0) + spent
        costs["costs/plugins_share"] = report["total_share"]
        if "syncs" in report:
            costs["costs/syncs_per_update"] = sum(row["per_update"] for row in report["syncs"])
        if self._ranks is not None:
            if self._events is not None:
                self._events.collect()
            on_device = step.trainer.env.device.type == "cuda"
            found = self._ranks.compare(times.phases(on_device), report["update_us"] / 1e6 + times.parts()["data"])
            costs |= {f"rates/{name}": value for name, value in found.items()}
        step.trainer.publish(costs)

    @property
    def report(self) -> dict[str, Any]:
        """What hooks took since the first update, as plain data: the part `hooks` of RUN/spans.json."""
        assert self.times is not None
        found = self.times.report()
        return found if self._syncs is None else {**found, "syncs": self._syncs.rows(found["updates"])}

    def limit(self, trainer: forge.Run) -> Verdict | None:
        """Return what limits the updates since the first."""
        if self.times is None or self.times.updates < 1:
            return None
        if self._events is not None:
            self._events.collect()
        works = self._waiting.works if self._waiting is not None else None
        busy = None if works is None else works - self.times.phases(on_device=True)["to_device"]  # a copy is no work
        flops = None if self._rates is None else self._rates.flops
        calls, reads = (None, {}) if flops is None else (flops.calls, flops.reads)
        ranks = () if self._ranks is None else self._ranks.own
        syncs = self.report.get("syncs", ())
        if self._rates is not None and sum(row["per_update"] for row in syncs) >= OFTEN:
            busy = self._rates.least_seconds(trainer)  # a host that waits in the update hides what the GPU works
        return limit_of(trainer, self.times, busy=busy, calls=calls, reads=reads, syncs=syncs, ranks=ranks)

    # -- the file -----------------------------------------------------------------------------------------------------

    def _write(self, trainer: forge.Run, account: goodput.TimeAccount, shows: bool = False) -> None:
        account.settle()
        self._written = account.ended
        if self._folder is None:
            return
        if self._earlier is None:
            resumes = trainer.resumed_from is not None
            self._earlier = goodput.attempts_in(RunFolder(self._folder).spans) if resumes else []
        attempts = [*self._earlier, account.attempt]
        content: dict[str, Any] = {"attempts": [each.as_json() for each in attempts]}
        if self.times is not None:
            content |= {"hooks": self.report, "verdict": str(self.limit(trainer) or "")}
        if self._rates is not None and self.config.rates:
            content["rates"] = self._rates.sentence()
        try:
            with atomic_write(self._folder / goodput.FILE) as beside:
                beside.write_text(json.dumps(content) + "\n")
        except OSError as error:
            self._folder = None
            logger.error("spans: %s cannot be written, and is no more: %s.", goodput.FILE, error)
        spent = goodput.account(attempts)
        if shows and spent is not None and self._written - self._shown > SHOWN_EVERY:
            self._shown = self._written
            trainer.publish({"goodput": forge.Text(spent.markdown())})


class Compiled:
    """What torch compiles from here on, as far as it reports it."""

    def __init__(self) -> None:
        self._last = next(reversed(compiled_frames()), None)

    def seconds(self) -> float:
        """Return the seconds in which torch compiled since the last call."""
        frames = compiled_frames()
        seen = next((number for number, frame in enumerate(frames) if frame is self._last), -1)
        self._last = frames[-1] if frames else None
        return sum((getattr(frame, "duration_us", None) or 0) / 1e6 for frame in frames[seen + 1 :])


def compiled_frames() -> list[Any]:
    """Return what torch has compiled in this process, as far as it reports it."""
    return list(internals.compilation_metrics()) if dynamo_is_loaded() else []
