"""throughput: tokens and FLOPs against hand-computed ones, compiled or not."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import forge
from forge_plugins import Accumulate
from forge_plugins.throughput.flops import Counting
from forge_plugins.throughput.peaks import as_computed, peak_of
from tests.support import throughput_kit
from tests.support.tasks import Classifier, make_batches
from tests.support.throughput_kit import MLP, Clock, logged, tokens

clock = throughput_kit.clock


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
    assert log["throughput/tokens_per_s"] == pytest.approx(7 * log["throughput/samples_per_s"])


@pytest.mark.parametrize("kind", [int, torch.tensor])
@pytest.mark.parametrize(
    ("given", "task", "train", "name"),
    [
        ({}, Language, tokens, "tokens"),
        ({}, Classifier, lambda: make_batches(5, size=2), "items"),
        ({"items": "pixels"}, Classifier, lambda: make_batches(5, size=2), "pixels"),
    ],
)
def test_what_a_task_counts_has_its_own_rate(kind: Any, given: Any, task: Any, train: Any, name: str) -> None:
    class Counts(task):
        def num_items(self, batch: Any) -> Any:
            return kind(6)

    log = logged(Counts(), train=train(), given=given)[5]
    assert log[f"throughput/{name}_per_s"] == pytest.approx(3 * log["throughput/samples_per_s"])


# -- FLOPs ------------------------------------------------------------------------------------------------------------


def mlp_flops(m: int, *widths: int) -> int:
    """2·m·n·k forward and for the weights' gradients; for the inputs' too, except for the data."""
    products = [2 * m * k * n for k, n in pairwise(widths)]
    return 3 * sum(products) - products[0]


def flops_per_second(log: dict[str, Any]) -> float:
    return log["throughput/tflops"] * 1e12


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
    assert counting.count.total == mlp_flops(m, *widths)
    assert counting.count.dtype == "fp32"


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
    assert counting.count.dtype == "bf16"


def test_the_peak_and_the_formula_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logs = logged(train=make_batches(6), given={"peak": 2.0})
    assert "MFU = FLOP/s ÷ 2 TFLOP/s, throughput.peak." in caplog.text
    assert logs[6]["throughput/mfu"] == pytest.approx(logs[6]["throughput/tflops"] / 2)


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA H100 80GB HBM3", "fp32", 66.9),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA B200", "bf16", 2250),
        ("Something New", "bf16", None),
        ("CPU", "fp32", None),
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
    assert "throughput/activations_gb" not in log
