import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Task(forge.TaskModule):
    """Depth of a quake from two traces."""

    def __init__(self, width: int = 16, lr: float = 1e-9):
        super().__init__()
        self.lr = lr
        self.conv = nn.Sequential(
            nn.Conv1d(2, width, 5, stride=2), nn.ReLU(), nn.Conv1d(width, 2 * width, 5, stride=2), nn.ReLU()
        )
        self.out = nn.Sequential(nn.Flatten(), nn.Linear(2 * width * 9, 1))

    def forward(self, x):
        return self.out(self.conv(x)).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(51)
    depth = torch.randn(900, generator=g)
    t = torch.arange(48.0)
    delay = (14 + 5 * depth.clamp(-2, 2)).unsqueeze(1)
    first = torch.exp(-((t - 10) ** 2) / 6).expand(900, 48)
    second = torch.exp(-((t - delay - 8) ** 2) / 10)
    x = torch.stack([first + 0.5 * second, second], 1) * 2 + 0.3 * torch.randn(900, 2, 48, generator=g)
    y = depth + 0.1 * torch.randn(900, generator=g)
    dataset = TensorDataset(x, y)
    train, val = random_split(dataset, [720, len(dataset) - 720], generator=torch.Generator().manual_seed(22))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
