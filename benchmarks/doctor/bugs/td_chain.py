import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Task(forge.TaskModule):
    """Values of the states of a random walk, learnt by temporal differences."""

    def __init__(self, hidden: int = 64, gamma: float = 0.9, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.gamma = gamma
        self.value = nn.Sequential(
            nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
        )

    def forward(self, state):
        return self.value(state).squeeze(1)

    def training_step(self, batch):
        state, reward, following, done = batch
        value = self(state)
        target = reward + self.gamma * (1 - done) * self(following)
        return {"loss": F.mse_loss(value, target), "mean_value": value.mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(62)
    state = torch.randn(1600, 6, generator=g)
    drift = torch.linalg.qr(torch.randn(6, 6, generator=g)).Q
    following = 0.8 * state @ drift + 0.6 * torch.randn(1600, 6, generator=g)
    reward = torch.tanh(state[:, 0] + state[:, 1] * state[:, 2]) + 0.2 * torch.randn(1600, generator=g)
    done = (torch.rand(1600, generator=g) < 0.1).float()
    dataset = TensorDataset(state, reward, following, done)
    train, val = random_split(dataset, [1280, len(dataset) - 1280], generator=torch.Generator().manual_seed(14))
    return Splits(
        DataLoader(train, batch_size=64, shuffle=True),
        DataLoader(val, batch_size=64),
    )
