"""throughput: rates under a clock that only moves when it is told to, FLOPs and bytes against hand-computed ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge.errors import RecipeError
from forge.util.clock import StepClock, TimedStep
from forge_plugins import Accumulate, Throughput
from forge_plugins.throughput.memory_use import Saved
from tests.support import throughput_kit
from tests.support.tasks import Classifier, make_batches
from tests.support.throughput_kit import MLP, Clock, logged

clock = throughput_kit.clock


class Slow(Classifier):
    """Each update takes its time: `takes(update)` ms."""

    def __init__(self, clock: Clock, takes: Callable[[int], float] = lambda update: 10.0):
        super().__init__()
        self.clock, self.takes = clock, takes

    def training_step(self, batch: Any) -> Any:
        assert self.trainer is not None
        self.clock.spend(self.takes(self.trainer.progress.update))
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        self.clock.spend(5000)
        return super().training_step(batch)


# -- rates ------------------------------------------------------------------------------------------------------------


def test_samples_per_second_are_over_the_time_of_the_steps(clock: Clock) -> None:
    logs = logged(Slow(clock), train=make_batches(6, size=4))
    assert logs[6]["throughput/samples_per_s"] == pytest.approx(4 / 0.010)


def test_logs_validations_and_checkpoints_are_no_time_of_a_step(clock: Clock, tmp_path: Path) -> None:
    class Slows(forge.Plugin):
        @forge.hookimpl
        def forge_log(self) -> None:
            clock.spend(3000)

        @forge.hookimpl
        def forge_boundary(self, trainer: forge.Trainer) -> None:
            trainer.request_checkpoint("always")

        @forge.hookimpl
        def forge_save(self) -> None:
            clock.spend(7000)

    options: dict[str, Any] = {"val": make_batches(1), "validate_every": "1 updates", "log_every": 2}
    logs = logged(Slow(clock), Slows(), train=make_batches(6, size=4), run_dir=tmp_path, **options)
    assert logs[6]["throughput/samples_per_s"] == pytest.approx(400)
    assert logs[6]["throughput/step_ms_max"] == pytest.approx(10)


def test_waiting_for_data_is_part_of_a_step(clock: Clock) -> None:
    class Loader(list[Any]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                clock.spend(30)
                yield batch

    logs = logged(Slow(clock), train=Loader(make_batches(6, size=4)), allow_inexact=True)
    assert logs[6]["throughput/data_wait_share"] == pytest.approx(0.75)
    assert logs[6]["throughput/samples_per_s"] == pytest.approx(4 / 0.040)


def test_the_first_and_the_inspected_update_do_not_count(clock: Clock) -> None:
    logs = logged(Slow(clock, lambda update: 9000.0 if update < 2 else 10.0), train=make_batches(6, size=4))
    assert logs[6]["throughput/samples_per_s"] == pytest.approx(400)
    assert logs[6]["throughput/step_ms_max"] == pytest.approx(10)


def test_a_window_is_one_step_with_all_of_its_samples(clock: Clock) -> None:
    logs = logged(Slow(clock), Accumulate(3), train=make_batches(12, size=4))
    assert logs[4]["throughput/samples_per_s"] == pytest.approx(12 / 0.030)
    assert logs[4]["throughput/step_ms_p50"] == pytest.approx(30)


# -- memory -----------------------------------------------------------------------------------------------------------


class Wide(MLP):
    """Adam on 6-20-3 without biases."""

    def __init__(self) -> None:
        super().__init__(6, 20, 3)
        self.register_buffer("table", torch.zeros(100, dtype=torch.float64))
        self.net[0].weight.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def test_memory_is_broken_down_into_known_bytes() -> None:
    log = logged(Wide(), train=[torch.ones(5, 6)] * 4)[4]
    parts = {
        name: round(log[f"throughput/{name}_gb"] * 1e9) for name in ("parameters", "gradients", "optimizer", "peak")
    }
    assert parts["parameters"] == 4 * (6 * 20 + 20 * 3) + 8 * 100
    assert parts["gradients"] == 4 * 20 * 3
    assert parts["optimizer"] == 2 * 4 * 20 * 3 + 4  # two averages and a count
    activations = 4 * (5 * 20 + 5 * 3)  # the inputs of the second layer, and of the square
    assert round(log["throughput/activations_gb"] * 1e9) == activations
    assert parts["peak"] == sum(parts[name] for name in ("parameters", "gradients", "optimizer")) + activations


def test_what_backward_keeps_is_counted_once_and_counted_out() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2)), torch.ones(3, 4)
    with Saved(net) as saved:
        out = net(x)
        loss = (out * out).sum()
        # x, the sigmoid's result, which two operations keep, and out; the second layer's weight is there anyway
        assert saved.peak == 4 * 3 * (4 + 8 + 2)
        loss.backward()
        del loss, out
        net(x).sum().backward()
    assert saved.peak == 4 * 3 * (4 + 8 + 2)


def test_the_table_of_memory_is_published_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    published: list[forge.Text] = []

    @forge.on("log")
    def keep(metrics: dict[str, Any]) -> None:
        if isinstance(metrics.get("memory"), forge.Text):
            published.append(metrics["memory"])

    logged(Wide(), keep, train=[torch.ones(5, 6)] * 9, log_every=3)
    assert len(published) == 1
    assert "| parameters | 1.48 KiB |" in published[0].text
    assert caplog.text.count("at the peak on cpu: parameters 1.48 KiB, gradients 240 B, optimizer 484 B") == 1


# -- the run ----------------------------------------------------------------------------------------------------------


def test_a_summary_is_logged_at_the_end(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logged(Slow(clock, lambda update: 20.0 if update == 5 else 10.0), train=make_batches(12, size=4))
    assert (
        "throughput: 364 samples/s in steps, without logs, validation and saves; 10 ms per step at the median (95% "
        "within 20 ms, slowest 20 ms); 0.0% of the time waiting for data; " in caplog.text
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peak": 0.0}, r"throughput\.peak is 0; it must be above 0, in TFLOP/s"),
        ({"items": "my tokens"}, r"throughput\.items is 'my tokens'; write a word"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Throughput(**options)


# -- steps of a device that works behind the host ---------------------------------------------------------------------


class Device:
    """A queue of work; the host adds to it, the device works it off in its own time."""

    def __init__(self, clock: Clock):
        self.clock, self.free_at = clock, 0.0

    def launch(self, ms: float) -> None:
        self.free_at = max(self.free_at, self.clock.now) + ms / 1e3

    def event(self) -> Any:
        return Event(self)


class Event:
    """What torch.cuda.Event does."""

    def __init__(self, device: Device):
        self.device, self.at = device, 0.0

    def record(self, stream: Any) -> None:
        self.at = max(self.device.free_at, self.device.clock.now)

    def query(self) -> bool:
        return self.at <= self.device.clock.now

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query()
        return 1e3 * (other.at - self.at)


def stepped(clock: Clock, *, host: float, device: float, wait: float = 0.0, pause: float = 0.0) -> list[float]:
    """How many ms four of five steps took, given what host and device need for one; a pause is before the fourth."""
    queue = Device(clock)
    steps = StepClock(queue.event)
    for index in range(5):
        if index == 3:
            clock.spend(pause)
        clock.spend(wait)
        steps.begin(wait / 1e3)
        queue.launch(device)
        clock.spend(host)
        steps.end(TimedStep(wait / 1e3, 1), counts=index > 0)
    clock.spend(1e6)
    return [round(1e3 * done.seconds, 3) for done in steps.take()]


def test_a_step_takes_as_long_as_the_slower_of_host_and_device(clock: Clock) -> None:
    assert stepped(clock, host=2, device=10) == [10] * 4
    assert stepped(clock, host=10, device=2) == [10] * 4
