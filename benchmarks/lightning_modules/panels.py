"""Series for neuralforecast."""

from __future__ import annotations

from typing import Any

import numpy as np


def panel(module: Any) -> list[Any]:
    """Return a train loader of neuralforecast's own, and no val loader."""
    import pandas as pd
    from neuralforecast.tsdataset import TimeSeriesDataset, TimeSeriesLoader

    draw = np.random.default_rng(0)
    days = pd.date_range("2020-01-01", periods=48)
    rows = [pd.DataFrame({"unique_id": i, "ds": days, "y": draw.normal(size=48).cumsum()}) for i in range(24)]
    data = TimeSeriesDataset.from_df(pd.concat(rows, ignore_index=True))[0]
    return [TimeSeriesLoader(data, batch_size=8, shuffle=False), None]
