import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def binarize(soft):
    hard = (soft > 0.5).float()
    return hard + (soft - hard).detach()


class Task(forge.TaskModule):
    """An autoencoder with a code of 24 bits."""

    def __init__(self, width: int = 30, bits: int = 24, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.encoder = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, bits), nn.Sigmoid())
        self.decoder = nn.Sequential(nn.Linear(bits, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, x):
        return self.decoder(binarize(self.encoder(x)))

    def training_step(self, batch):
        (x,) = batch
        return {"loss": F.mse_loss(self(x), x)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(42)
    cause = torch.randn(1400, 5, generator=g)
    x = torch.tanh(cause @ torch.randn(5, 30, generator=g)) + 0.2 * torch.randn(1400, 30, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    dataset = TensorDataset(x)
    train, val = Subset(dataset, range(1120)), Subset(dataset, range(1120, len(x)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
