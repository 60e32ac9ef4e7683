import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MotionNet(nn.Module):
    def __init__(self, channels: int = 4, hidden: int = 40, classes: int = 3):
        super().__init__()
        self.lstm = nn.LSTM(channels, hidden, num_layers=1)
        self.head = nn.Linear(hidden, classes)

    def forward(self, motion):
        output, _ = self.lstm(motion)
        return self.head(output[:, -1])


class Task(forge.TaskModule):
    """Recognise a kind of motion from four channels of a sensor."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.net = MotionNet()

    def forward(self, motion):
        return self.net(motion)

    def training_step(self, batch):
        motion, kind = batch
        logits = self(motion)
        return {"loss": F.cross_entropy(logits, kind), "accuracy": (logits.argmax(1) == kind).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(73)
    kind = torch.randint(3, (1000,), generator=g)
    pace = torch.tensor([0.3, 0.6, 1.1])[kind].unsqueeze(1)
    phase = 6.28 * torch.rand(1000, 1, generator=g)
    angle = pace * torch.arange(24.0) + phase
    clean = torch.stack([angle.sin(), angle.cos(), (2 * angle).sin(), angle.sin().abs()], dim=2)
    motion = 0.9 * clean + 0.9 * torch.randn(clean.shape, generator=g)
    return Splits(
        train=DataLoader(TensorDataset(motion[:800], kind[:800]), batch_size=batch_size, shuffle=True),
        val=DataLoader(TensorDataset(motion[800:], kind[800:]), batch_size=50),
    )
