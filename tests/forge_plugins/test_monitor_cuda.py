"""monitor on a CUDA device: nothing waits between looks, the numbers are the CPU's, and the weights keep their bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge_plugins import AMP, Accumulate, Clip, Monitor
from tests.support.monitor_kit import Keep
from tests.support.tasks import Classifier, fit, make_batches

pytestmark = pytest.mark.gpu


class Net(Classifier):
    """Dropout, batch normalisation, a fused optimizer."""

    def __init__(self, width: int = 8, dropout: float = 0.2, kind: str = "AdamW"):
        super().__init__()
        self.kind = kind
        self.net = nn.Sequential(
            nn.Linear(8, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 3)
        )

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.kind)(self.parameters(), lr=1e-2, fused=True)


def made(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def pinned(count: int) -> list[Any]:
    return [(x.pin_memory(), y.pin_memory()) for x, y in make_batches(count)]


@pytest.mark.parametrize("window", [1, 3])
def test_nothing_waits_for_the_device_between_looks(window: int, syncs_are_errors: forge.Plugin) -> None:
    plugins = [Monitor("1000 updates", histograms=True), Clip(0.1), Accumulate(window), syncs_are_errors]
    assert fit(made(), pinned(30), max_updates=8, device="cuda", plugins=plugins, log_every=1000).updates == 8


@pytest.mark.parametrize("window", [1, 2])
def test_numbers_are_those_of_the_cpu(window: int) -> None:
    kept = {device: Keep() for device in ("cpu", "cuda")}
    for device, keep in kept.items():
        plugins = [Monitor("1 updates", histograms=True), Accumulate(window), keep]
        fit(made(dropout=0.0, kind="SGD"), make_batches(4), device=device, plugins=plugins)
    assert kept["cuda"].updates == kept["cpu"].updates
    for update in kept["cpu"].updates:
        expected, found = kept["cpu"].of(update), kept["cuda"].of(update)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, forge.Histogram):
                assert found[name].counts.device.type == "cpu"
                assert found[name].counts.sum() == value.counts.sum()
            else:
                assert found[name] == pytest.approx(value, rel=1e-2, abs=1e-4), name


def test_gradients_of_half_precision_are_read_unscaled() -> None:
    kept = {dtype: Keep() for dtype in ("fp16", None)}
    for dtype, keep in kept.items():
        amp = [AMP(dtype=dtype, init_scale=1024.0)] if dtype else []
        fit(made(width=64, dropout=0.0), make_batches(2, 32), device="cuda", plugins=[Monitor("1 updates"), *amp, keep])
    found, expected = (kept[dtype].of(1)["grad_norm"] for dtype in ("fp16", None))
    assert found == pytest.approx(expected, rel=0.05)
