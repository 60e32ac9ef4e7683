import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Predict how a panel of annotators distributes its votes over five ratings."""

    def __init__(self, hidden: int = 64, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 5)
        )

    def forward(self, features):
        return F.softmax(self.net(features), dim=-1)

    def training_step(self, batch):
        features, votes = batch
        predicted = self(features)
        loss = F.kl_div(predicted, votes, reduction="batchmean")
        agreement = (predicted.argmax(-1) == votes.argmax(-1)).float().mean()
        return {"loss": loss, "agreement": agreement}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=1e-4)


def data(batch_size: int = 50) -> Splits:
    g = torch.Generator().manual_seed(21)
    features = torch.randn(1500, 10, generator=g)
    weights = torch.randn(10, 16, generator=g) / 10**0.5
    quality = torch.tanh(1.5 * features @ weights) @ torch.randn(16, 5, generator=g)
    chances = torch.softmax(quality, dim=-1)
    votes = torch.multinomial(chances, 20, replacement=True, generator=g)
    votes = F.one_hot(votes, 5).float().mean(1)
    return Splits(
        train=TensorLoader(features[:1200], votes[:1200], batch_size=batch_size, shuffle=True),
        val=TensorLoader(features[1200:], votes[1200:], batch_size=150),
    )
