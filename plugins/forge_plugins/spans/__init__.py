"""Spans: where the time of a run goes."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import forge
from forge.errors import RecipeError
from forge.runs.folder import RunFolder
from forge.spans import goodput, record, told
from forge.spans.device import DeviceTimes
from forge.spans.file import SpanFile
from forge.spans.ranks import SlowRanks
from forge.spans.verdict import Verdict
from forge.torch_internals import dynamo_is_loaded
from forge.util.files import atomic_write
from forge_plugins import torch_internals as internals
from forge_plugins.spans.flops import FlopCount
from forge_plugins.spans.limits import batches_of, limit_of
from forge_plugins.spans.syncs import NamedSyncs
from forge_plugins.spans.updates import UpdateRates
from forge_plugins.spans.waiting import WaitingGpu

logger = logging.getLogger("forge")

EVERY = 10.0
"""Seconds between two writes of RUN/spans.json."""
MANY = 2**15
"""Spans that wait to be written, at most."""


class Spans(forge.Plugin):
    """Account for the time of a run: the share in updates that count, and where the rest went.

    When to use it: always; it is part of the recipe `default`, and costs about a µs per update.

    What you see: the card of the run, `forge runs` and reports have the share of the wall time that was spent in
    updates that count, over all attempts of the run: goodput. The rest is the start of each attempt, compiling,
    waiting for data, validation, checkpoints (the time that training waits for them), logs, stalls, and work that was
    lost: what an attempt did after the checkpoint that the next one went on from, or that a rewind went back to. The
    parts add up to the wall time of all attempts. Time between attempts, as in a queue, is told beside it. On a GPU
    that waits for the host in the first updates, a line says so, with what capturing the update would gain.

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
    share of time in which the host waited for the loader. A step lasts from the end of the one before to its own;
    logs, validations and checkpoints are not included. On CUDA the device records the time at both ends, and the host
    reads it later: nothing waits, and a log covers the updates that are finished by then. `tokens_per_s` is logged if a
    batch begins with a two-dimensional tensor of integers; if the task defines `num_items`, its rate has that name
    then, otherwise `items_per_s`. `rates/tflops` is the work per second, in 10¹² FLOPs, and `rates/mfu` is FLOP/s ÷ the
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
        self._records = self.config.hooks or self.config.file
        if not self.config.rates and not self._records:
            self.forge_train_step = None  # pyright: ignore[reportAttributeAccessIssue]

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        self._account = self.times = self._rates = self._syncs = self._ranks = self._batches = None
        self._earlier: list[goodput.TimedAttempt] | None = None
        self._folder: Path | None = None
        "Where the account is written."
        self._waiting: WaitingGpu | None = None
        self._looks: WaitingGpu | None = None
        "The same, while it looks."
        self._file: SpanFile | None = None
        self._written = goodput.clock()
        if trainer.verb != "fit":
            return
        asked = self.config.rates or self._records
        device = DeviceTimes() if asked and torch.cuda.is_available() else None
        self._account = goodput.TimeAccount(Compiled().seconds, trainer.instrument, device)
        trainer.instrument = self._account.instrument
        if self._records:
            self.times = record.HookTimes(self._account, self, keeps=self.config.file)
            trainer.instrument = self.times.instrument

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        account, env = self._account, trainer.env
        if account is None:
            return
        self._waiting = self._looks = WaitingGpu.of(trainer)
        self._folder = trainer.run_dir if env.is_main else None
        on_cuda = env.device.type == "cuda"
        if account.device is not None and on_cuda:
            account.device.start(torch.cuda.current_stream(env.device))
        self._flops = FlopCount(env.device, self.config.peak)
        if self.config.rates:
            self._rates = UpdateRates(trainer, account, self._flops)
        if self.times is None:
            return
        self._syncs = NamedSyncs() if on_cuda else None
        self._ranks = SlowRanks(env) if env.world > 1 else None
        self._batches = batches_of(trainer)[0]
        if self._batches is not None:
            self._batches.spent = torch.zeros(2, dtype=torch.float64).share_memory_()
        if self.config.file and trainer.run_dir is not None:
            self._file = SpanFile(trainer.run_dir, env.rank)

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        """Count the FLOPs of an early update."""
        counting = self._flops.turn(step)
        if counting is not None:
            with counting:
                return (yield)
        if self._flops.told and self.config.rates and step.trainer.env.is_main:
            logger.info("spans: %s", self._flops.told)
        step.trainer.switch_hooks(self, "forge_train_step", on=False)
        return (yield)

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run, step: forge.Step) -> None:
        account = self._account
        if account is None:
            return
        saved = account.update(step)
        if self._rates is not None:
            self._rates.end(step)
        if self.times is not None:
            self._count(self.times, step)
        if (self._rates is not None or self.times is not None) and step.ends_interval:
            self._tell(step)
        if saved or account.ended - self._written > EVERY:
            self._write(trainer, account)
        if self._looks is not None and account.usual is not None and not self._looks.look(step, account.usual):
            if text := self._looks.sentence(account.usual):
                logger.info("%s", text)
            self._looks = None

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
        if self._rates is not None and (text := self._rates.sentence()) and trainer.env.is_main:
            logger.info("spans: %s.", text)
        if self.times is not None and trainer.env.is_main:
            logger.info("spans: %s\n%s", told.as_text(self.report), self.limit(trainer))
        if self._batches is not None:
            self._batches.spent = None

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _count(self, times: record.HookTimes, step: forge.Step) -> None:
        """Count an update."""
        times.update(step.index)
        if not times.updates and self._syncs is not None:
            self._syncs.start()
        if times.spans is None:
            return
        if self._file is None:  # without a run folder
            times.spans.clear()
        elif step.ends_interval or len(times.spans) > MANY:
            self._file.take(times.spans)

    def _tell(self, step: forge.Step) -> None:
        """Log the rates of an interval, and what each plugin costs on average since the first update."""
        found = {} if self._rates is None else self._rates.take()
        if self.times is not None and self.times.updates:
            found |= self._costs(self.times, step.trainer.env.device.type == "cuda")
        if found:
            step.trainer.publish(found)

    def _costs(self, times: record.HookTimes, on_cuda: bool) -> dict[str, float]:
        report, costs = self.report, dict[str, float]()
        for row in report["rows"]:
            spent = row["us_per_update"] if row["is_cost"] else 0.0
            costs[f"costs/{row['plugin']}"] = costs.get(f"costs/{row['plugin']}", 0.0) + spent
        costs["costs/plugins_share"] = report["total_share"]
        if "syncs" in report:
            costs["costs/syncs_per_update"] = sum(row["per_update"] for row in report["syncs"])
        if self._ranks is not None:
            found = self._ranks.compare(times.phases(on_cuda), report["update_us"] / 1e6 + times.parts()["data"])
            costs |= {f"rates/{name}": value for name, value in found.items()}
        return costs

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
        works = self._waiting.works if self._waiting is not None else None
        ranks = () if self._ranks is None else self._ranks.own
        return limit_of(trainer, self.times, self._flops, works, self.report.get("syncs", ()), ranks)

    # -- the file -----------------------------------------------------------------------------------------------------

    def _write(self, trainer: forge.Run, account: goodput.TimeAccount) -> None:
        account.settle()
        self._written = account.ended
        if self._folder is None:
            return
        if self._earlier is None:
            resumes = trainer.resumed_from is not None
            self._earlier = goodput.attempts_in(RunFolder(self._folder).spans) if resumes else []
        attempts = [*self._earlier, account.attempt]
        content: dict[str, Any] = {"attempts": [asdict(each) for each in attempts]}
        if self.times is not None:
            content |= {"hooks": self.report, "verdict": str(self.limit(trainer) or "")}
        if self._rates is not None:
            content["rates"] = self._rates.sentence()
        try:
            with atomic_write(self._folder / goodput.FILE) as beside:
                beside.write_text(json.dumps(content) + "\n")
        except OSError as error:
            self._folder = None
            logger.error("spans: %s cannot be written, and is no more: %s.", goodput.FILE, error)


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
