"""finetuning-scheduler."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import classes, loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("finetuning-scheduler==2.14.1", alone=True)


def finetuning_scheduler_phases() -> Any:
    """A module whose configure_callbacks brings the FinetuningScheduler, which thaws layer by layer."""
    import lightning as L
    import torch
    from finetuning_scheduler import FinetuningScheduler
    from torch import nn

    class Thaws(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1]))

        def configure_optimizers(self) -> Any:
            parameters = [p for p in self.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]

        def configure_callbacks(self) -> Any:
            schedule = {
                0: {"params": ["head.*"], "max_transition_epoch": 1},
                1: {"params": ["body.*"], "max_transition_epoch": 2},
            }
            return [FinetuningScheduler(ft_schedule=schedule, epoch_transitions_only=True)]

    return Thaws(), loader(numbers(16, 6), classes(3, 16)), loader(numbers(8, 6, seed=1), classes(3, 8, seed=1))
