import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Forecaster(nn.Module):
    def __init__(self, hidden: int, horizon: int):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.heads = nn.ModuleList(nn.Linear(hidden, 1) for _ in range(horizon))

    def forward(self, past):
        _, h = self.rnn(past.unsqueeze(-1))
        return [head(h[-1]).squeeze(1) for head in self.heads]


class Task(forge.TaskModule):
    def __init__(self, hidden: int = 32, horizon: int = 6, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = Forecaster(hidden, horizon)

    def forward(self, past):
        return torch.stack(self.net(past), 1)

    def training_step(self, batch):
        past, future = batch
        per_step = []
        for k, prediction in enumerate(self.net(past)):
            per_step.append(F.mse_loss(prediction, future[:, k]))
        later = torch.tensor(per_step[1:]).sum()
        return {"loss": (per_step[0] + later) / len(per_step), "last_step": per_step[-1]}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(77)
    t = torch.arange(30.0)
    phase = 6.28 * torch.rand(1000, 1, generator=g)
    speed = 0.2 + 0.5 * torch.rand(1000, 1, generator=g)
    series = torch.sin(speed * t + phase) + 0.5 * torch.cos(2 * speed * t) + 0.1 * torch.randn(1000, 30, generator=g)
    past, future = series[:, :24], series[:, 24:]
    dataset = TensorDataset(past, future)
    train, val = random_split(dataset, [800, len(dataset) - 800], generator=torch.Generator().manual_seed(14))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
