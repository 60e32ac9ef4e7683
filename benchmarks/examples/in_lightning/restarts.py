from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.utils.data import DataLoader, TensorDataset

from forge_recipes.digits import digits


class Restarts(L.LightningModule):
    def __init__(self, lr: float = 0.1, first: int = 20):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))

    def forward(self, images):
        return self.net(images)

    def step(self, batch, stage):
        images, labels = batch
        logits = self(images)
        loss, accuracy = F.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()
        self.log_dict({f"{stage}/loss": loss, f"{stage}/accuracy": accuracy})
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        schedule = CosineAnnealingWarmRestarts(optimizer, T_0=self.hparams.first, T_mult=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def run(folder, *callbacks):
    data = digits()
    train = DataLoader(TensorDataset(*data.train.tensors), batch_size=64, shuffle=True)
    saves = ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=10, save_last=True)
    last = Path(folder, "checkpoints/last.ckpt")
    L.seed_everything(0)
    task = Restarts()
    callbacks = [saves, LearningRateMonitor(), *callbacks]
    trainer = L.Trainer(max_steps=75, callbacks=callbacks, default_root_dir=folder, log_every_n_steps=1)
    trainer.fit(task, train, ckpt_path=last if last.exists() else None)
    return task, trainer
