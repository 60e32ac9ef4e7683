"""pytorch-forecasting: TemporalFusionTransformer."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("pytorch-forecasting")


def make() -> Any:
    from pytorch_forecasting import TemporalFusionTransformer

    from benchmarks.lightning_modules.series import forecasting

    data, train, val = forecasting(known=["month"], quantiles=True)
    return (
        TemporalFusionTransformer.from_dataset(
            data, hidden_size=8, attention_head_size=1, hidden_continuous_size=4, dropout=0.1, learning_rate=0.03
        ),
        train,
        val,
    )
