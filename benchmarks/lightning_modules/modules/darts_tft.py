"""darts: the module of its TFTModel."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("darts", needs=("pytorch-lightning",))


def make() -> Any:
    import numpy as np
    from darts import TimeSeries
    from darts.models import TFTModel
    from darts.models.forecasting import torch_forecasting_model
    from torch.utils.data import DataLoader

    draw = np.random.default_rng(0)
    series = TimeSeries.from_values(draw.normal(size=60).cumsum().astype(np.float32))
    model = TFTModel(
        input_chunk_length=12,
        output_chunk_length=4,
        hidden_size=8,
        add_relative_index=True,
        random_state=1,
        batch_size=8,
    )
    data = model._build_train_dataset(
        series=[series], past_covariates=None, future_covariates=None, sample_weight=None, max_samples_per_ts=None
    )
    model.train_sample = data[0]
    module = model._init_model() or model.model
    return module, DataLoader(data, batch_size=8, collate_fn=torch_forecasting_model._batch_collate_fn_train), None
