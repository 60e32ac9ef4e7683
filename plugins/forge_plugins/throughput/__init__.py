"""Throughput, step times, FLOP/s and memory."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

import forge
from forge.errors import RecipeError
from forge.util.clock import StepClock, TimedStep, Totals, percentile
from forge_plugins.throughput import memory_use, summary
from forge_plugins.throughput.inspection import StepInspection
from forge_plugins.throughput.items import Items
from forge_plugins.throughput.peaks import peak_of
from forge_plugins.throughput.stragglers import DeviceProduct, LastGradient, Stragglers, meets_once

logger = logging.getLogger("forge")

RECENT = 10_000
"""Updates that the percentiles of the final line cover."""
RATES = ("samples_per_s", "step_ms_p50", "step_ms_p95", "step_ms_max", "data_wait_share", "tflops", "mfu")
MEMORY = tuple(f"{part}_gb" for part in ("parameters", "gradients", "optimizer", "activations", "other", "peak"))


class Throughput(forge.Plugin):
    """Measure samples per second, step times, FLOP/s, MFU and memory.

    When to use it: to compare speed settings, and to see how much of the device a run uses. It costs a few µs per
    update.

    What you see: every log has `throughput/samples_per_s`, `step_ms_p50`, `_p95` and `_max`, and `data_wait_share`: the
    share of time in which the host waited for the loader. A step lasts from the start of that wait to its end; logs,
    validations and checkpoints are not included. On CUDA the device records the time at the end of each step, and the
    host reads it later: nothing waits, and a log covers the steps that are finished by then. The first two updates are
    not counted: one is a warm-up, in the other FLOPs are counted. After a resume rates start again.

    `tokens_per_s` is logged if a batch begins with a two-dimensional tensor of integers. If the task defines
    `num_items`, its rate is called `tokens_per_s` in that case, otherwise `items_per_s`, or as `items` says.

    `throughput/tflops` is the work per second, in 10¹² FLOPs, and `throughput/mfu` is FLOP/s ÷ the device's peak: the
    data sheet's value for dense products in the type that most of the work uses. The log names the peak; set `peak` for
    a device that is not in the table. FLOPs are counted with the formulas of torch's flop counter in the second update
    of each optimizer, and assumed to grow with the number of samples. Recomputation by activation checkpointing counts,
    because the device does compute it. Inside compiled code nothing can be counted, so forward and backward run once on
    a copy of the task without values; if that does not work, the log says why. Operations without a formula are named;
    kernels that torch does not know cannot be counted.

    `throughput/peak_gb` (10⁹ bytes) and its parts are logged too: parameters (with buffers), gradients, optimizer
    state, activations. On CUDA the peak is the maximum that torch allocated since the run began (its peak counter is
    reset at the start), activations are the remainder at the peak, including temporary tensors, and `other` is memory
    held between steps beside the rest. On a CPU activations are what backward keeps.

    On several ranks, `throughput/slowest_rank` is the rank that the others wait for, `straggler_share` the share of an
    update for which it holds up the median rank, and `waited_ms_rank0`, `_rank1`, … the time that each rank waits for
    it (up to 16 ranks). Each rank measures how long it takes until it begins to compute, and until its last gradient is
    there, which is when ddp and zero begin to wait for others; at a log all ranks exchange three numbers over the host.
    A rank that costs a tenth of an update or more at three logs in a row is named in a warning, with its host and what
    to look at. With several optimizers, and where ranks meet inside of forward and backward (fsdp, tensor_parallel,
    pipeline, context_parallel, zero.stage=2), a rank's own work cannot be told from its waiting. So each rank also
    multiplies two matrices at a log, for 0.2 % of the time at most, and a device that takes 1.5 times as long as the
    median rank's is named (`product_ms_rank0`, …).

    ::

        forge fit quickstart -p throughput trainer.max_epochs=3
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        items: str | None = None
        "Name of what num_items counts, such as tokens, for its rate; null: tokens or items, by the batch."
        flops: bool = True
        "Count FLOPs."
        peak: float | None = None
        "The device's peak in TFLOP/s, instead of the table of data sheets."
        memory: bool = True
        "Measure memory."

    config: Config
    observer = True
    provides = ("throughput",)
    cures = {"measure": "-p {name}"}
    charts = {
        "throughput/samples per second": r"throughput/samples_per_s",
        "throughput/tokens or items per second": r"throughput/(?!samples_)\w+_per_s",
        "throughput/step time, in ms": r"throughput/step_ms_.+",
        "throughput/share of the time that is spent waiting for data": r"throughput/data_wait_share",
        "throughput/rank that the others wait for": r"throughput/slowest_rank",
        "throughput/share of the time that the median rank waits for it": r"throughput/straggler_share",
        "throughput/time that each rank waits for the slowest, in ms per update": r"throughput/waited_ms_rank\d+",
        "throughput/time of a product on each rank's device, in ms": r"throughput/product_ms_rank\d+",
        "throughput/TFLOP per second": r"throughput/tflops",
        "throughput/share of the device's peak (MFU)": r"throughput/mfu",
        "throughput/memory, in GB": r"throughput/.+_gb",
    }

    def __init__(self, *first: str | None, **values: Any):
        super().__init__(*first, **values)
        config = self.config
        if config.peak is not None and config.peak <= 0:
            raise RecipeError(f"throughput.peak is {config.peak:g}; it must be above 0, in TFLOP/s.")
        if config.items is not None and not config.items.isidentifier():
            raise RecipeError(f"throughput.items is {config.items!r}; write a word, such as tokens.")
        self._running = False

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        if trainer.verb != "fit":
            return
        device, config = trainer.env.device, self.config
        on_cuda = device.type == "cuda"
        self._running = True
        self._clock = StepClock.on(device)
        self._items = Items(config.items, trainer.task_defines_num_items)
        self._look = StepInspection(trainer, config.flops, activations=config.memory and not on_cuda)
        self._step: forge.Step | None = None
        "The current step."
        self._flops: float | None = None
        "Its FLOPs so far."
        self._counts = False
        "Whether its time counts."
        self._updates = 0
        self._peak: float | None = None
        "The device's peak, in FLOP/s."
        self._breakdown: memory_use.Breakdown | None = None
        self._total = Totals(times=deque(maxlen=RECENT))
        self._failed = False
        self._stragglers = Stragglers(trainer.env) if trainer.env.world > 1 else None
        self._last_gradient: LastGradient | None = None
        self._product = DeviceProduct(device) if self._stragglers is not None else None
        if self._stragglers is not None and meets_once(trainer):
            self._last_gradient = LastGradient(list(trainer.task.parameters()), self._clock.ready)
            self._last_gradient.learn()
        if on_cuda and config.memory:
            torch.cuda.reset_peak_memory_stats(device)

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        if self._step is not step:
            self._step, self._flops, self._counts = step, 0.0, self._updates > 0
            self._clock.begin(step.data_wait)
            if self._stragglers is not None:
                self._clock.computes()
        look = self._look.at(step)
        if look is None:
            result = yield
        else:
            self._counts = False
            with look:
                result = yield
        if self._flops is not None:
            flops = self._look.flops(step)
            self._flops = None if flops is None else self._flops + flops
        return result

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        if self._step is not step:  # a skipped window is not a step
            return
        self._step = None
        self._updates += 1
        self._clock.end(TimedStep(step.data_wait, step.samples, self._items.of(step), self._flops), self._counts)
        if self._last_gradient is not None:
            self._last_gradient.settle()
        if self._look.fresh:
            self._log_flops(step.trainer)
        if step.ends_interval:
            self._record(step)

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._failed = True

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        if not self._running:  # not a fit, or ended before it began
            return
        self._running = False
        if self._last_gradient is not None:
            self._last_gradient.remove()
        if not self._failed:
            trainer.env.synchronize()  # the run is over, so waiting for the device is fine
        self._take()
        if self._total.updates and trainer.env.is_main:
            text = summary.of_run(self._total, self._items.name, self._peak, self._breakdown)
            logger.info("throughput: %s", text)

    # -- at a log -----------------------------------------------------------------------------------------------------

    def _record(self, step: forge.Step) -> None:
        done = self._take()
        values = self._rates(done) if done.updates else {}
        if self.config.memory and self._updates > 1:
            values |= self._memory(step.trainer)
        if self._stragglers is not None:
            values |= self._compare_ranks(step, self._stragglers, done, values)
        for name, value in values.items():
            step.record(f"throughput/{name}", value)

    def _take(self) -> Totals:
        done = self._clock.take()
        for step in done:
            self._total.add(step)
        return Totals.of(done)

    def _rates(self, done: Totals) -> dict[str, Any]:
        values: dict[str, Any] = {"samples_per_s": done.rate(done.samples)}
        if self._items.name is not None:
            values[f"{self._items.name}_per_s"] = done.rate(done.items)
        shares = {"p50": 0.5, "p95": 0.95, "max": 1.0}
        values |= {f"step_ms_{name}": 1e3 * percentile(done.times, share) for name, share in shares.items()}
        values["data_wait_share"] = done.rate(done.waited)
        if done.flops_per_second is not None:
            values["tflops"] = done.flops_per_second / 1e12
            if self._peak is not None:
                values["mfu"] = done.flops_per_second / self._peak
        return values

    def _compare_ranks(
        self, step: forge.Step, stragglers: Stragglers, done: Totals, values: dict[str, Any]
    ) -> dict[str, float]:
        """Return the metrics of all ranks together. A value that only others have is recorded with the weight 0, since
        all ranks must record the same names: a device may not have finished, or its FLOPs may be unknown."""
        candidates = [*RATES, *self._items.candidates, *MEMORY]
        product = self._product.seconds() if self._product is not None else 0.0
        paces, elsewhere = stragglers.exchange(done, [name in values for name in candidates], product)
        for name, known in zip(candidates, elsewhere, strict=True):
            if known and name not in values and step.recording:
                step.trainer.means.add(f"throughput/{name}", 0.0, 0)
        if self._last_gradient is not None and done.updates and done.own is None:
            self._last_gradient.learn()  # its parameter may be frozen by now
        return {} if paces is None else stragglers.judge(paces)

    def _memory(self, trainer: forge.Run) -> dict[str, float]:
        found, before = self._breakdown, self._breakdown
        if found is None or trainer.env.device.type == "cuda":
            found = self._breakdown = memory_use.Breakdown.of(trainer, self._look.activations)
        if before is None:
            trainer.publish({"memory": forge.Text(found.markdown())})
            if trainer.env.is_main:
                logger.info("throughput: memory %s.", found.text(str(trainer.env.device)))
        return {f"{name}_gb": number / 1e9 for name, number in found.rows().items()}

    # -- FLOPs --------------------------------------------------------------------------------------------------------

    def _log_flops(self, trainer: forge.Run) -> None:
        """Log the counted FLOPs and the peak."""
        self._look.fresh = False
        dtype, name = self._look.dtype, summary.device_name(trainer.env.device)
        given = self.config.peak
        peak = given if given is not None else peak_of(name, dtype) if dtype is not None else None
        self._peak = None if peak is None else peak * 1e12
        if trainer.env.is_main:
            logger.info("throughput: %s", summary.of_flops(self._look.counts, dtype, name, peak, given is not None))
