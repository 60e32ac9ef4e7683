"""torch-spatiotemporal: Predictor with a recurrent network over a graph."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("torch-spatiotemporal", needs=("torch_geometric",))


def make() -> Any:
    import numpy as np
    import torch
    from tsl.data import SpatioTemporalDataset
    from tsl.data.loader import StaticGraphLoader
    from tsl.engines import Predictor
    from tsl.metrics.torch import MaskedMAE
    from tsl.nn.models import RNNModel

    draw = np.random.default_rng(0)
    data = SpatioTemporalDataset(draw.normal(size=(80, 4, 1)).astype(np.float32), window=8, horizon=2)
    model = RNNModel(input_size=1, output_size=1, horizon=2, hidden_size=8)
    module = Predictor(model, MaskedMAE(), optim_class=torch.optim.Adam, optim_kwargs={"lr": 1e-2})
    return module, StaticGraphLoader(data, batch_size=8), None
