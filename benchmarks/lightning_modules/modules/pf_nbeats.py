"""pytorch-forecasting: NBeats."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("pytorch-forecasting")


def make() -> Any:
    from pytorch_forecasting import NBeats

    from benchmarks.lightning_modules.series import forecasting

    data, train, val = forecasting()
    return NBeats.from_dataset(data, widths=[16, 16], learning_rate=0.01), train, val
