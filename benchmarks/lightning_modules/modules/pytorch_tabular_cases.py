"""pytorch-tabular."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package(
    "pytorch-tabular",
    needs=("pytorch-tabnet", "einops", "scikit-learn", "category-encoders", "scikit-base"),
    alone=True,
)


def tabular_fttransformer() -> Any:
    """The FT-Transformer."""
    import numpy as np
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import FTTransformerConfig

    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(64, 4)), columns=list("abcd"))
    frame["y"] = frame.sum(axis=1)
    tabular = TabularModel(
        data_config=DataConfig(target=["y"], continuous_cols=list("abcd")),
        model_config=FTTransformerConfig(task="regression", input_embed_dim=8, num_heads=2, num_attn_blocks=1),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(batch_size=8, checkpoints=None, load_best=False),
    )
    data = tabular.prepare_dataloader(frame[:48], frame[48:], seed=1)
    module = tabular.prepare_model(data)
    train = data.train_dataloader()
    return module, type(train)(train.dataset, batch_size=8), data.val_dataloader()
