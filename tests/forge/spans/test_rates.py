"""Rates under a clock that only moves when it is told to, and FLOPs against hand-computed ones, compiled or not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import forge
from forge.errors import RecipeError
from forge.spans.device import DeviceTimes
from forge.spans.goodput import TimeAccount
from forge.spans.record import HookTimes
from forge_plugins import Accumulate, Guard, Spans
from forge_plugins.spans.flops import Counting
from forge_plugins.spans.peaks import as_computed, peak_of
from tests.support import spans_kit
from tests.support.spans_kit import MLP, Clock, logged, tokens
from tests.support.tasks import Classifier, make_batches

clock = spans_kit.clock


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
    assert logs[6]["rates/samples_per_s"] == pytest.approx(400)
    assert logs[6]["rates/step_ms_max"] == pytest.approx(10)


def test_waiting_for_data_is_part_of_a_step(clock: Clock) -> None:
    class Loader(list[Any]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                clock.spend(30)
                yield batch

    logs = logged(Slow(clock), train=Loader(make_batches(6, size=4)), allow_inexact=True)
    assert logs[6]["rates/data_wait_share"] == pytest.approx(0.75)
    assert logs[6]["rates/samples_per_s"] == pytest.approx(4 / 0.040)


def test_the_first_and_the_inspected_update_do_not_count(clock: Clock) -> None:
    logs = logged(Slow(clock, lambda update: 9000.0 if update < 2 else 10.0), train=make_batches(6, size=4))
    assert logs[6]["rates/samples_per_s"] == pytest.approx(400)
    assert logs[6]["rates/step_ms_max"] == pytest.approx(10)


def test_a_window_is_one_step_with_all_of_its_samples(clock: Clock) -> None:
    logs = logged(Slow(clock), Accumulate(3), train=make_batches(12, size=4))
    assert logs[4]["rates/samples_per_s"] == pytest.approx(12 / 0.030)
    assert logs[4]["rates/step_ms_p50"] == pytest.approx(30)


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
    queue, times, found = Device(clock), DeviceTimes(), []
    times.make_event = queue.event
    times.start(None)
    times.lap()
    for index in range(5):
        times.pause()
        clock.spend(pause * (index == 3))
        times.go_on()
        clock.spend(wait)
        queue.launch(device)
        clock.spend(host)
        found.append(times.lap())
    clock.spend(1e6)
    return [round(1e3 * times.seconds(parts), 3) for parts in found][1:]


def test_a_step_takes_as_long_as_the_slower_of_host_and_device(clock: Clock) -> None:
    assert stepped(clock, host=2, device=10) == [10] * 4
    assert stepped(clock, host=10, device=2) == [10] * 4
    assert stepped(clock, host=10, device=2, wait=5, pause=500) == [15] * 4


def test_the_first_update_and_validations_are_no_time_of_a_phase_on_the_device(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    queue, device = Device(clock), DeviceTimes()
    device.make_event = queue.event
    device.start(None)

    class Launches(Classifier):
        def training_step(self, batch: Any) -> Any:
            assert self.trainer is not None
            queue.launch(10.0 if self.trainer.progress.update else 9000.0)
            return super().training_step(batch)

        def validation_step(self, batch: Any) -> Any:
            queue.launch(5000)
            clock.spend(20_000)  # as it reads its metrics, the device has ended all
            return super().training_step(batch)

    account = TimeAccount(device=device)
    times = HookTimes(account)

    @forge.on("boundary")
    def count(step: forge.Step) -> None:
        account.update(step)
        times.update(step.index)

    trainer = forge.Trainer(plugins=[count], max_updates=5, run_dir=False, validate_every="1 updates")
    trainer.instrument = times.instrument
    trainer.fit(Launches(), make_batches(5), make_batches(1))
    assert times.phases(on_device=True)["forward"] == pytest.approx(0.010)


# -- tokens -----------------------------------------------------------------------------------------------------------


class Language(forge.TaskModule):
    """Next tokens from an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(self.head(self.embed(x)).flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_tokens_are_counted_for_inputs_of_whole_numbers() -> None:
    log = logged(Language(), train=tokens())[5]
    assert log["rates/tokens_per_s"] == pytest.approx(7 * log["rates/samples_per_s"])


@pytest.mark.parametrize("kind", [int, torch.tensor])
@pytest.mark.parametrize(
    ("task", "train", "name"),
    [
        (Language, tokens, "tokens"),
        (Classifier, lambda: make_batches(5, size=2), "items"),
    ],
)
def test_what_a_task_counts_has_its_own_rate(kind: Any, task: Any, train: Any, name: str) -> None:
    class Counts(task):
        def num_items(self, batch: Any) -> Any:
            return kind(6)

    log = logged(Counts(), train=train())[5]
    assert log[f"rates/{name}_per_s"] == pytest.approx(3 * log["rates/samples_per_s"])


# -- FLOPs ------------------------------------------------------------------------------------------------------------


def mlp_flops(m: int, *widths: int) -> int:
    """2·m·n·k forward and for the weights' gradients; for the inputs' too, except for the data."""
    products = [2 * m * k * n for k, n in pairwise(widths)]
    return 3 * sum(products) - products[0]


def flops_per_second(log: dict[str, Any]) -> float:
    return log["rates/tflops"] * 1e12


@pytest.mark.parametrize("window", [1, 2])
def test_flops_are_those_of_the_textbook(clock: Clock, window: int) -> None:
    class Timed(MLP):
        def training_step(self, batch: Any) -> Any:
            clock.spend(10)
            return super().training_step(batch)

    logs = logged(Timed(6, 20, 3), Accumulate(window), train=[torch.ones(5, 6)] * 8)
    assert flops_per_second(logs[8 // window]) == pytest.approx(mlp_flops(5, 6, 20, 3) / 0.010)


@given(m=st.integers(1, 9), widths=st.lists(st.integers(1, 30), min_size=2, max_size=5))
def test_any_mlp_is_counted_exactly(m: int, widths: list[int]) -> None:
    task = MLP(*widths)
    with Counting() as counting:
        task.training_step(torch.ones(m, widths[0])).backward()
    assert counting.by_dtype.total() == mlp_flops(m, *widths)
    assert set(counting.by_dtype) == {"fp32"}


def test_values_that_the_step_reads_are_counted_by_line_and_what_plugins_read_is_not() -> None:
    class Reads(MLP):
        def training_step(self, batch: Any) -> Any:
            self.seen = [value.item() for value in batch[0]]
            return super().training_step(batch)

    spans = Spans(rates=True)
    forge.Trainer(plugins=[spans, Guard()], max_updates=3, run_dir=False).fit(Reads(6, 3), [torch.ones(5, 6)] * 3)
    (where, count), *others = spans._flops.reads.items()
    assert (count, others) == (6, [])
    assert "test_rates.py" in where


def test_a_smaller_last_batch_counts_as_much_less(clock: Clock) -> None:
    class Timed(MLP):
        def training_step(self, batch: Any) -> Any:
            clock.spend(len(batch))
            return super().training_step(batch)

    logs = logged(Timed(6, 20, 3), train=[torch.ones(n, 6) for n in (8, 8, 8, 2)])
    assert flops_per_second(logs[4]) == pytest.approx(mlp_flops(1, 6, 20, 3) / 0.001)


def test_the_type_of_number_is_that_of_the_products() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with Counting() as counting, torch.autocast("cpu", torch.bfloat16):
        net(torch.ones(2, 4)).sum().backward()
    assert counting.by_dtype.most_common(1)[0][0] == "bf16"


def test_the_peak_and_the_formula_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logs = logged(train=make_batches(6), given={"peak": 2.0})
    assert "MFU = FLOP/s ÷ 2 TFLOP/s, spans.peak." in caplog.text
    assert logs[6]["rates/mfu"] == pytest.approx(logs[6]["rates/tflops"] / 2)


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp32", 66.9),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A10", "bf16", 125),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("Something New", "bf16", None),
    ],
)
def test_peaks_are_found_by_the_words_of_a_devices_name(device: str, dtype: str, peak: float | None) -> None:
    assert peak_of(device, dtype) == peak


def test_float32_is_tf32_only_where_it_is_allowed() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for precision, expected in (("highest", "fp32"), ("high", "tf32")):
            torch.set_float32_matmul_precision(precision)
            assert as_computed(torch.float32, torch.device("cuda"), convolution=False) == expected
            assert as_computed(torch.float32, torch.device("cpu"), convolution=False) == "fp32"
    finally:
        torch.set_float32_matmul_precision(before)


# -- compiled ---------------------------------------------------------------------------------------------------------


class Block(nn.Sequential):
    """A Sequential itself may compile to nothing, depending on torch's version."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for module in self:
            input = module(input)
        return input


class Compiled(MLP):
    """Dropout and batch statistics inside of what is compiled."""

    def __init__(self) -> None:
        super().__init__(6, 20, 3)
        self.net = Block(self.net[0], nn.BatchNorm1d(20), nn.Dropout(0.5), self.net[1])
        self.net.compile(backend="aot_eager")


@pytest.mark.slow
def test_compiled_code_is_counted_on_a_copy_without_numbers(clock: Clock) -> None:
    class Timed(Compiled):
        def training_step(self, batch: Any) -> Any:
            clock.spend(10)
            return super().training_step(batch)

    log = logged(Timed(), train=[torch.ones(5, 6)] * 5)[5]
    assert flops_per_second(log) == pytest.approx(mlp_flops(5, 6, 20, 3) / 0.010)


def test_a_peak_is_above_0() -> None:
    with pytest.raises(RecipeError, match=r"spans\.peak is 0; it must be above 0, in TFLOP/s"):
        Spans(peak=0.0)
