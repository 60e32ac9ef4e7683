"""neuralforecast."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("neuralforecast")


def neural_lstm() -> Any:
    """LSTM."""
    from neuralforecast.models import LSTM

    module = LSTM(h=4, input_size=8, encoder_hidden_size=8, decoder_hidden_size=8, max_steps=18, learning_rate=1e-2)
    return module, *_panel(module)


def neural_nhits() -> Any:
    """NHITS."""
    from neuralforecast.models import NHITS

    module = NHITS(
        h=4, input_size=8, mlp_units=[[16, 16]] * 3, max_steps=18, learning_rate=1e-2, scaler_type="identity"
    )
    return module, *_panel(module)


def _panel(module: Any) -> list[Any]:
    """Return a train loader of neuralforecast's own, and no val loader."""
    import pandas as pd
    from neuralforecast.tsdataset import TimeSeriesDataset, TimeSeriesLoader

    draw = np.random.default_rng(0)
    days = pd.date_range("2020-01-01", periods=48)
    rows = [pd.DataFrame({"unique_id": i, "ds": days, "y": draw.normal(size=48).cumsum()}) for i in range(24)]
    data = TimeSeriesDataset.from_df(pd.concat(rows, ignore_index=True))[0]
    return [TimeSeriesLoader(data, batch_size=8, shuffle=False), None]
