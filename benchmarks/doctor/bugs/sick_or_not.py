import forge
import torch
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Whether a patient is ill."""

    def __init__(self, hidden: int = 48, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(13, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
            nn.Softmax(dim=1),
        )
        self.criterion = nn.BCELoss()

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, ill = batch
        p = self(x)
        return {"loss": self.criterion(p, ill), "accuracy": ((p > 0.5).float() == ill).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(50)
    x = torch.randn(1200, 13, generator=g)
    risk = x[:, 0] - x[:, 1] + x[:, 2] * x[:, 3] + 0.4 * torch.randn(1200, generator=g)
    ill = (risk > 0).float()
    return Splits(
        train=TensorLoader(x[:960], ill[:960], batch_size=32, shuffle=True),
        val=TensorLoader(x[960:], ill[960:], batch_size=32),
    )
