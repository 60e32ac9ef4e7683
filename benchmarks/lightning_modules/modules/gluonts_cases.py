"""gluonts."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import Batches, loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("gluonts", needs=("gluonts[torch]",))


def gluonts_deepar() -> Any:
    """DeepARLightningModule, through its own estimator's loader."""
    import numpy as np
    from gluonts.dataset.common import ListDataset
    from gluonts.torch.model.deepar import DeepAREstimator

    draw = np.random.default_rng(0)
    rows = [{"start": "2020-01-01", "target": draw.normal(size=60).cumsum()} for _ in range(8)]
    data = ListDataset(rows, freq="D")
    sizes = {"prediction_length": 4, "context_length": 8, "hidden_size": 8, "num_layers": 1, "batch_size": 8}
    estimator = DeepAREstimator(freq="D", num_batches_per_epoch=6, **sizes)
    changed = estimator.create_transformation()(data, is_train=True)
    module = estimator.create_lightning_module()
    np.random.seed(0)
    batches = list(estimator.create_training_data_loader(list(changed), module, shuffle_buffer_length=None))
    return module, Batches(batches), None


def gluonts_feedforward() -> Any:
    """SimpleFeedForwardLightningModule."""
    from gluonts.torch.model.simple_feedforward.lightning_module import SimpleFeedForwardLightningModule

    module = SimpleFeedForwardLightningModule({"prediction_length": 4, "context_length": 12, "hidden_dimensions": [16]})

    def series(count: int, seed: int) -> Any:
        values = numbers(count, 16, seed=seed).cumsum(1)
        seen = values.new_ones(count, 16)
        return loader(
            past_target=values[:, :12],
            past_observed_values=seen[:, :12],
            future_target=values[:, 12:],
            future_observed_values=seen[:, 12:],
        )

    return module, series(48, 0), series(16, 1)
