import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError
from torchmetrics.classification import MulticlassF1Score


class Orders(L.LightningModule):
    def __init__(self, weight: float = 0.5, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.kind, self.price = nn.Linear(64, 4), nn.Linear(64, 1)
        self.train_f1, self.train_mae = MulticlassF1Score(4, average="macro"), MeanAbsoluteError()
        self.val_f1, self.val_mae = MulticlassF1Score(4, average="macro"), MeanAbsoluteError()

    def step(self, batch, stage, f1, mae):
        x, kind, price = batch
        hidden = self.body(x)
        logits, guess = self.kind(hidden), self.price(hidden).squeeze(1)
        f1(logits, kind)
        mae(guess, price)
        kind_loss, price_loss = F.cross_entropy(logits, kind), F.mse_loss(guess, price)
        loss = kind_loss + self.hparams.weight * price_loss
        self.log_dict({f"{stage}/loss": loss, f"{stage}/kind_loss": kind_loss, f"{stage}/price_loss": price_loss})
        self.log_dict({f"{stage}/f1": f1, f"{stage}/mae": mae})
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train", self.train_f1, self.train_mae)

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val", self.val_f1, self.val_mae)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


x = torch.randn(2400, 12, generator=torch.Generator().manual_seed(0))
kind, price = x[:, :4].argmax(1), x[:, 4:8].sum(1) + x[:, 8] * x[:, 9]
train = DataLoader(TensorDataset(x[:2000], kind[:2000], price[:2000]), batch_size=64, shuffle=True)
val = DataLoader(TensorDataset(x[2000:], kind[2000:], price[2000:]), batch_size=100)
L.seed_everything(0)
trainer = L.Trainer(max_epochs=5, default_root_dir="runs/orders")
trainer.fit(Orders(), train, val)
