"""Rates on a CUDA device: the device's own times and its peak, and nothing waits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge_plugins import AMP, Accumulate, Prefetch, Spans
from forge_plugins.spans.peaks import peak_of
from tests.support.tasks import fit

pytestmark = pytest.mark.gpu

WIDTH, SAMPLES = 1024, 256


@pytest.fixture(autouse=True)
def default_mode() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("default")
    yield
    torch.cuda.set_sync_debug_mode("default")


class Strict(forge.Plugin):
    """From the second update to the end of the last, a wait is an error."""

    @forge.hookimpl
    def forge_step_end(self) -> None:
        torch.cuda.set_sync_debug_mode("error")

    @forge.hookimpl
    def forge_end(self) -> None:
        torch.cuda.set_sync_debug_mode("default")


class MLP(forge.TaskModule):
    """Three layers without a bias, large enough to keep a device busy for a moment."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(self.second(self.first(x).relu()).relu()))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self(batch).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


FLOPS = (3 * 3 - 1) * 2 * SAMPLES * WIDTH * WIDTH
"""Three products a layer, but the data need no gradient."""
WEIGHTS = 4 * 3 * WIDTH * WIDTH


def batches(count: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SAMPLES, WIDTH, generator=generator).pin_memory() for _ in range(count)]


def measured(*plugins: forge.Plugin, task: forge.TaskModule | None = None, **options: Any) -> dict[str, float]:
    train = options.pop("train", None) or batches()
    return fit(task or MLP(), train, device="cuda", plugins=[Spans(rates=True), *plugins], **options).metrics


@pytest.mark.parametrize("window", [1, 2])
def test_nothing_waits_for_the_device(window: int) -> None:
    metrics = measured(Accumulate(window), Strict(), train=batches(12), log_every=2)
    assert metrics["rates/samples_per_s"] > 0
    assert metrics["rates/step_ms_p50"] <= metrics["rates/step_ms_p95"] <= metrics["rates/step_ms_max"]


def test_items_that_are_on_the_device_are_not_read() -> None:
    class Counts(MLP):
        def num_items(self, batch: torch.Tensor) -> torch.Tensor:
            return (batch == batch).sum()

    metrics = measured(Prefetch(), Strict(), task=Counts(), train=batches(12), log_every=4)
    assert metrics["rates/items_per_s"] == pytest.approx(WIDTH * metrics["rates/samples_per_s"], rel=1e-4)


def test_a_step_lasts_as_long_as_the_device_works_on_it() -> None:
    """The host is done at once; the device sleeps for 20 million cycles, several milliseconds at any clock rate."""

    class Sleeps(MLP):
        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            torch.cuda._sleep(20_000_000)
            return super().training_step(batch)

    metrics = measured(task=Sleeps(), train=batches(30), log_every=10)
    assert metrics["rates/step_ms_p50"] > 2
    assert metrics["rates/samples_per_s"] < SAMPLES / 2e-3


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_mfu_is_of_the_devices_peak_for_the_type_in_use(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    name = torch.cuda.get_device_name()
    peak = peak_of(name, dtype)
    if peak is None:
        pytest.skip(f"the peak of {name} is not in the table")
    metrics = measured(*([AMP("bf16")] if dtype == "bf16" else []), train=batches(30), log_every=10)
    assert f"{peak:g} TFLOP/s, the data sheet's dense {dtype} peak of {name}." in caplog.text
    assert metrics["rates/mfu"] == pytest.approx(metrics["rates/tflops"] / peak, rel=1e-4)
    assert 0 < metrics["rates/mfu"] < 1
    per_sample = 1e12 * metrics["rates/tflops"] / metrics["rates/samples_per_s"]
    assert per_sample == pytest.approx(FLOPS / SAMPLES, rel=1e-4)


def test_compiled_code_is_counted_in_the_type_of_its_autocast(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    task = MLP(dropout=0.1)
    task.second.compile(backend="aot_eager")
    metrics = measured(AMP("bf16"), task=task, train=batches(12))
    assert "(100% bf16)" in caplog.text
    per_sample = 1e12 * metrics["rates/tflops"] / metrics["rates/samples_per_s"]
    assert per_sample == pytest.approx(FLOPS / SAMPLES, rel=1e-4)
