"""pytorch-forecasting: NHiTS."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("pytorch-forecasting")


def make() -> Any:
    from pytorch_forecasting import NHiTS

    from benchmarks.lightning_modules.series import forecasting

    data, train, val = forecasting()
    return NHiTS.from_dataset(data, hidden_size=16, learning_rate=0.01), train, val
