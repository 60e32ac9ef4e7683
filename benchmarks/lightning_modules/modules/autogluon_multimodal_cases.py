"""autogluon.multimodal."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from benchmarks.lightning_modules.draw import Dicts, classes, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package(
    "autogluon.multimodal==1.6.3",
    needs=("autogluon.common==1.6.3", "autogluon.core==1.6.3", "autogluon.features==1.6.3", "timm<1.0.7", "nlpaug"),
    alone=True,
)


def autogluon_numerical() -> Any:
    """LitModule with a NumericalMLP: two learning rates, warm-up, a metric that decides."""
    import lightning as L
    import torch
    from autogluon.multimodal.models.numerical_mlp import NumericalMLP
    from autogluon.multimodal.optim.lit_module import LitModule
    from torchmetrics import Accuracy

    model = NumericalMLP("numerical_mlp", in_features=5, hidden_features=8, out_features=8, num_classes=3)
    module = LitModule(
        model,
        optim_type="adamw",
        lr_choice="two_stages",
        lr_schedule="cosine_decay",
        lr=1e-2,
        lr_decay=0.9,
        end_lr=0,
        lr_mult=2,
        weight_decay=1e-3,
        warmup_steps=0.1,
        loss_func=torch.nn.CrossEntropyLoss(),
        validation_metric=Accuracy(task="multiclass", num_classes=3),
        validation_metric_name="accuracy",
    )
    keys = model.numerical_key, model.label_key
    train, val = (dict(zip(keys, (numbers(n, 5, seed=n), classes(3, n)), strict=True)) for n in (16, 8))

    class Data(L.LightningDataModule):
        """The module counts the batches of its datamodule."""

        def train_dataloader(self) -> Any:
            return DataLoader(Dicts(**train), batch_size=8)

        def val_dataloader(self) -> Any:
            return DataLoader(Dicts(**val), batch_size=8)

    return module, Data(), None
