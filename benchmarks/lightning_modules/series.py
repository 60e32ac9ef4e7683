"""Series for the packages that forecast."""

from __future__ import annotations

from typing import Any

import numpy as np


def forecasting(known: list[str] | None = None, quantiles: bool = False) -> Any:
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
