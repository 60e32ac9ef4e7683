"""gluonts: DeepARLightningModule, through its own estimator's loader."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import Batches
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("gluonts", needs=("gluonts[torch]",))


def make() -> Any:
    import numpy as np
    from gluonts.dataset.common import ListDataset
    from gluonts.torch.model.deepar import DeepAREstimator

    draw = np.random.default_rng(0)
    rows = [{"start": "2020-01-01", "target": draw.normal(size=60).cumsum()} for _ in range(8)]
    data = ListDataset(rows, freq="D")
    estimator = DeepAREstimator(
        freq="D",
        prediction_length=4,
        context_length=8,
        hidden_size=8,
        num_layers=1,
        batch_size=8,
        num_batches_per_epoch=6,
    )
    changed = estimator.create_transformation()(data, is_train=True)
    module = estimator.create_lightning_module()
    np.random.seed(0)
    batches = list(estimator.create_training_data_loader(list(changed), module, shuffle_buffer_length=None))
    return module, Batches(batches), None
