"""pytorch-forecasting: DeepAR."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("pytorch-forecasting")


def make() -> Any:
    from pytorch_forecasting import DeepAR

    from benchmarks.lightning_modules.series import forecasting

    data, train, val = forecasting()
    return DeepAR.from_dataset(data, hidden_size=8, rnn_layers=1, dropout=0.1, learning_rate=0.03), train, val
