"""deeptab."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from benchmarks.lightning_modules.draw import numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("deeptab==2.1.0", needs=("pretab", "properscoring", "scikit-optimize", "einops"), alone=True)


def deeptab_resnet() -> Any:
    """TaskModel of ResNetRegressor, with the data of its datamodule."""
    import pandas as pd
    from deeptab.models import ResNetRegressor

    table = pd.DataFrame(numbers(24, 3).numpy(), columns=["a", "b", "c"])
    model = ResNetRegressor()
    model.build_model(table, table.sum(axis=1).to_numpy(), batch_size=8, random_state=0)
    data = model._data_module
    data.setup("fit")
    given = data.train_dataloader()  # shuffles, in another order under forge: the same samples in their own order
    return model._task_model, DataLoader(given.dataset, 8, collate_fn=given.collate_fn), data.val_dataloader()
