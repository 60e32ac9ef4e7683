"""What `infer.py` and `sweep.py` are given, as the pages are given the recipe `quickstart`: its network and its data."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from forge_recipes.digits import digits


class Digits(L.LightningModule):
    def __init__(self, hidden: int = 256, dropout: float = 0.3, lr: float = 3e-3, weight_decay: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU()]
        self.net = nn.Sequential(nn.Flatten(), *layers, nn.Dropout(dropout), nn.Linear(hidden, 10))

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
        return torch.optim.AdamW(self.parameters(), self.hparams.lr, weight_decay=self.hparams.weight_decay)


def loaders():
    data = digits()
    train = DataLoader(TensorDataset(*data.train.tensors), batch_size=64, shuffle=True)
    return train, DataLoader(TensorDataset(*data.val.tensors), batch_size=256)
