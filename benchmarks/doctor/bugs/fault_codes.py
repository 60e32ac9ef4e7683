import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Net(nn.Module):
    def __init__(self, classes: int = 6):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(2, 16, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(16, 32, 5, padding=2), nn.ReLU()
        )
        self.fc = nn.Linear(32, classes)

    def forward(self, x):
        x = self.conv(x).mean(-1)
        return F.log_softmax(self.fc(x), dim=0)


class Task(forge.TaskModule):
    """Fault class of a machine from two vibration channels."""

    def __init__(self, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = Net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        log_probs = self(x)
        return {"loss": F.nll_loss(log_probs, y), "accuracy": (log_probs.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(48)
    y = torch.randint(6, (900,), generator=g)
    t = torch.arange(48.0)
    rate = (0.25 + 0.2 * y.float()).unsqueeze(1) + 0.03 * torch.randn(900, 1, generator=g)
    phase = 6.28 * torch.rand(900, 1, generator=g)
    x = torch.stack([torch.sin(rate * t + phase), torch.cos(rate * t + phase)], 1)
    x = x + 0.5 * torch.randn(x.shape, generator=g)
    dataset = TensorDataset(x, y)
    train, val = Subset(dataset, range(720)), Subset(dataset, range(720, len(x)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
