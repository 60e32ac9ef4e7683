"""The modules of darts' models."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("darts", needs=("pytorch-lightning",))


def darts_nbeats() -> Any:
    return _module("NBEATSModel", num_stacks=2, layer_widths=16, dropout=0.1)


def darts_tcn() -> Any:
    return _module("TCNModel", dropout=0.1)


def darts_tft() -> Any:
    return _module("TFTModel", hidden_size=8, add_relative_index=True)


def _module(name: str, **options: Any) -> Any:
    import darts.models
    import numpy as np
    from darts import TimeSeries
    from darts.models.forecasting import torch_forecasting_model
    from torch.utils.data import DataLoader

    draw = np.random.default_rng(0)
    series = TimeSeries.from_values(draw.normal(size=60).cumsum().astype(np.float32))
    kind = getattr(darts.models, name)
    model = kind(input_chunk_length=12, output_chunk_length=4, random_state=1, batch_size=8, **options)
    data = model._build_train_dataset(
        series=[series], past_covariates=None, future_covariates=None, sample_weight=None, max_samples_per_ts=None
    )
    model.train_sample = data[0]
    module = model._init_model() or model.model
    return module, DataLoader(data, batch_size=8, collate_fn=torch_forecasting_model._batch_collate_fn_train), None
