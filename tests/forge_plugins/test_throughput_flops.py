"""throughput: tokens and FLOPs against hand-computed ones, compiled or not."""

from __future__ import annotations

import logging
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import forge
from forge.testing import assert_same_weights
from forge_plugins import Accumulate, Throughput
from forge_plugins.throughput.flops import Counting, probe
from forge_plugins.throughput.peaks import PEAKS, as_computed, peak_of
from tests.support import throughput_kit
from tests.support.tasks import Classifier, fit, make_batches
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


def test_whole_numbers_of_another_shape_are_no_tokens() -> None:
    class Names(Language):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return F.cross_entropy(self.head(self.embed(x)), y)

    train = [(torch.tensor([1, 2, 3]), torch.tensor([3, 2, 1]))] * 5
    assert "throughput/tokens_per_s" not in logged(Names(), train=train)[5]


def test_no_items_are_told_where_there_are_only_samples() -> None:
    assert [name for name in logged()[4] if name.startswith("throughput/") and name.endswith("_per_s")] == [
        "throughput/samples_per_s"
    ]


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


def test_items_that_nothing_counts_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    logged(given={"items": "tokens"})
    assert "throughput.items=tokens has nothing to count. Define num_items" in caplog.text


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


def test_the_flops_of_all_optimizers_are_added(clock: Clock) -> None:
    class Two(forge.TaskModule):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 4, bias=False), nn.Linear(6, 16, bias=False)

        def training_step(self, batch: torch.Tensor, name: str) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            clock.spend(5)
            return getattr(self, name)(batch).square().mean()

        def takes_turn(self, name: str, update: int) -> bool:
            return name == "a" or update % 2 == 0

        def configure_optimizers(self) -> Any:
            return {name: torch.optim.SGD(getattr(self, name).parameters(), lr=1e-3) for name in ("a", "b")}

    logs = logged(Two(), train=[torch.ones(5, 6)] * 9, log_every=1)
    assert flops_per_second(logs[8]) == pytest.approx(mlp_flops(5, 6, 4) / 0.005)
    assert flops_per_second(logs[9]) == pytest.approx((mlp_flops(5, 6, 4) + mlp_flops(5, 6, 16)) / 0.010)


def test_the_type_of_number_is_that_of_the_products() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with Counting() as counting, torch.autocast("cpu", torch.bfloat16):
        net(torch.ones(2, 4)).sum().backward()
    assert counting.count.dtype == "bf16"


def test_convolutions_are_counted() -> None:
    with Counting() as counting:
        nn.Conv2d(3, 8, 3, bias=False)(torch.ones(2, 3, 10, 10))
    assert counting.count.total == 2 * 2 * 8 * 8 * 8 * 3 * 9


def test_attention_is_counted_or_said_not_to_be() -> None:
    """torch 2.10 has a formula for CUDA's kernels only."""
    q, k, v = torch.ones(3, 2, 4, 16, 8)
    with Counting() as counting:
        F.scaled_dot_product_attention(q, k, v)
    expected = 2 * (2 * 2 * 4 * 16 * 16 * 8)
    named = counting.count.unknown == {"aten._scaled_dot_product_flash_attention_for_cpu": 1}
    assert counting.count.total == expected or named


def test_operations_without_a_formula_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    @torch.library.custom_op("forge_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_autograd(lambda ctx, gradient: gradient * 2)

    class Custom(MLP):
        def training_step(self, batch: Any) -> Any:
            return twice(super().training_step(batch))

    logged(Custom(6, 3), train=[torch.ones(5, 6)] * 4)
    assert "Not counted, because they have no formula: forge_test.twice." in caplog.text


def test_a_formula_that_fails_costs_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.flop_counter import flop_registry

    def broken(*args: Any, **kwargs: Any) -> int:
        raise AssertionError("shapes")

    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, broken)
    with Counting() as counting:
        torch.mm(torch.ones(2, 3), torch.ones(3, 4))
    assert counting.count.unknown == {"aten.mm": 1}


def test_the_peak_and_the_formula_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logs = logged(train=make_batches(6), given={"peak": 2.0})
    assert "MFU = FLOP/s ÷ 2 TFLOP/s, throughput.peak." in caplog.text
    assert logs[6]["throughput/mfu"] == pytest.approx(logs[6]["throughput/tflops"] / 2)


def test_an_unknown_device_says_so_and_has_no_mfu(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logs = logged(train=make_batches(6))
    assert "The fp32 peak of CPU is unknown, so MFU is not logged. Set throughput.peak=TFLOP/s." in caplog.text
    assert "throughput/mfu" not in logs[6]
    assert "throughput/tflops" in logs[6]


def test_flops_can_be_left_out() -> None:
    logs = logged(train=make_batches(6), given={"flops": False})
    assert "throughput/tflops" not in logs[6]
    assert "throughput/samples_per_s" in logs[6]


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


def test_every_entry_of_the_table_is_found_by_its_own_name() -> None:
    for name, peaks in PEAKS.items():
        assert {dtype: peak_of(f"NVIDIA {name} 80GB", dtype) for dtype in peaks} == peaks


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


@pytest.mark.slow
def test_a_task_that_is_compiled_as_a_whole_is_counted_too(clock: Clock) -> None:
    class Whole(MLP):
        def __init__(self) -> None:
            super().__init__(6, 20, 3)
            self.compile(backend="aot_eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).square().mean()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            clock.spend(10)
            return self(batch)

    log = logged(Whole(), train=[torch.ones(5, 6)] * 5)[5]
    assert flops_per_second(log) == pytest.approx(mlp_flops(5, 6, 20, 3) / 0.010)


@pytest.mark.slow
def test_compiled_code_stays_compiled_and_gives_the_same_bits() -> None:
    from torch._dynamo.utils import counters

    def trained(*plugins: forge.Plugin) -> tuple[Compiled, int]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        task, before = Compiled(), counters["stats"]["unique_graphs"]
        batches = [torch.randn(5, 6, generator=torch.Generator().manual_seed(i)) for i in range(6)]
        fit(task, batches, plugins=[*plugins, Accumulate(2)], seed=3)
        return task, counters["stats"]["unique_graphs"] - before

    (watched, graphs), (alone, expected) = trained(Throughput()), trained()
    assert graphs == expected > 0
    assert_same_weights(watched, alone)


@pytest.mark.slow
def test_a_function_the_task_compiles_stays_compiled() -> None:
    calls: list[bool] = []

    @torch.compile(backend="eager")
    def twice(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            calls.append(True)
        return x * 2

    class Calls(MLP):
        def training_step(self, batch: Any) -> Any:
            return twice(super().training_step(batch))

    logged(Calls(6, 3), train=[torch.ones(5, 6)] * 4)
    assert len(calls) <= 1  # the copy without numbers, which is no part of the run


@pytest.mark.slow
def test_a_task_that_needs_real_numbers_has_unknown_flops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Reads(Compiled):
        def training_step(self, batch: Any) -> Any:
            loss = super().training_step(batch)
            return loss * 2 if loss.item() > 0 else loss

    log = logged(Reads(), train=[torch.ones(5, 6)] * 4)[4]
    assert "throughput/tflops" not in log
    assert "throughput/samples_per_s" in log
    assert "the FLOPs of Reads are unknown: it is compiled" in caplog.text


@pytest.mark.slow
def test_the_copy_leaves_the_task_its_hooks_and_rng() -> None:
    class Draws(Compiled):
        def training_step(self, batch: Any) -> Any:
            self.drawn = random.random()
            return super().training_step(batch)

    task, seen = Draws(), []
    task.net[0].register_forward_hook(lambda *args: seen.append(args))

    @forge.on("step_end")
    def look(step: forge.Step) -> None:
        before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
        rng, drawn = (torch.get_rng_state(), random.getstate()), task.drawn
        seen.clear()
        assert probe(step, torch.bfloat16).dtype == "bf16"
        assert seen == []
        assert torch.equal(torch.get_rng_state(), rng[0])
        assert (random.getstate(), task.drawn) == (rng[1], drawn)
        assert all(parameter.grad is None for parameter in task.parameters())
        assert_same_weights(task, before)

    fit(task, [torch.ones(5, 6)] * 2, plugins=[look])
