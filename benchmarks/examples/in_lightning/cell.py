import lightning as L
import pandas as pd
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def step(self, batch, stage):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log(f"{stage}/loss", loss, prog_bar=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


x = torch.randn(256, 4)
data = DataLoader([(part, part[:, :3].argmax(1)) for part in x.split(16)], batch_size=None)
logger = CSVLogger("runs")
trainer = L.Trainer(max_epochs=3, logger=logger)
trainer.fit(Classifier(), data, data)
pd.read_csv(f"{logger.log_dir}/metrics.csv").groupby("epoch").last()
