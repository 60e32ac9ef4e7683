"""pytorch-forecasting."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("pytorch-forecasting")


def pf_deepar() -> Any:
    return _module("DeepAR", hidden_size=8, rnn_layers=1, dropout=0.1, learning_rate=0.03)


def pf_nbeats() -> Any:
    return _module("NBeats", widths=[16, 16], learning_rate=0.01)


def pf_nhits() -> Any:
    return _module("NHiTS", hidden_size=16, learning_rate=0.01)


def pf_recurrent() -> Any:
    return _module("RecurrentNetwork", hidden_size=8, learning_rate=0.01)


def pf_tft() -> Any:
    sizes = {"hidden_size": 8, "attention_head_size": 1, "hidden_continuous_size": 4}
    return _module("TemporalFusionTransformer", known=["month"], **sizes, dropout=0.1, learning_rate=0.03)


def _module(name: str, known: list[str] | None = None, **options: Any) -> Any:
    import pytorch_forecasting

    data, train, val = _forecasting(known)
    return getattr(pytorch_forecasting, name).from_dataset(data, **options), train, val


def _forecasting(known: list[str] | None) -> Any:
    """Return (TimeSeriesDataSet of pytorch-forecasting, train loader, val loader)."""
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet
    from pytorch_forecasting.data import NaNLabelEncoder

    draw = np.random.default_rng(0)
    parts = []
    for series in range(4):
        time = np.arange(40)
        value = np.sin(time / 4 + series) + 0.1 * draw.normal(size=40) + 2
        month = (time % 12).astype(float)
        parts.append(pd.DataFrame({"series": str(series), "time": time, "value": value, "month": month}))
    frame = pd.concat(parts, ignore_index=True)
    options: dict[str, Any] = {
        "time_idx": "time",
        "target": "value",
        "group_ids": ["series"],
        "categorical_encoders": {"series": NaNLabelEncoder().fit(frame.series)},
        "max_encoder_length": 12,
        "max_prediction_length": 4,
        "time_varying_unknown_reals": ["value"],
    }
    if known:
        options |= {"time_varying_known_reals": known, "static_categoricals": ["series"]}
    data = TimeSeriesDataSet(frame[frame.time < 36], **options)
    val = TimeSeriesDataSet.from_dataset(data, frame, min_prediction_idx=36)
    loaders = [each.to_dataloader(train=False, batch_size=16, num_workers=0) for each in (data, val)]
    return data, *loaders
