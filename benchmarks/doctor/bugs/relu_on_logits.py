import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


def dense(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())


class Task(forge.TaskModule):
    """Tell eight hand gestures apart by the readings of a glove."""

    def __init__(self, sensors: int = 20, gestures: int = 8, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(dense(sensors, 96), dense(96, 48), dense(48, gestures))

    def forward(self, readings):
        return self.net(readings)

    def training_step(self, batch):
        readings, gesture = batch
        logits = self(readings)
        return {"loss": F.cross_entropy(logits, gesture), "accuracy": (logits.argmax(1) == gesture).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(28)
    gesture = torch.randint(8, (1600,), generator=g)
    poses = torch.randn(8, 20, generator=g)
    bend = 0.7 * torch.randn(1600, 6, generator=g) @ torch.randn(6, 20, generator=g)
    readings = 0.9 * poses[gesture] + bend + 0.9 * torch.randn(1600, 20, generator=g)
    readings = (readings - readings[:1280].mean(0)) / readings[:1280].std(0)
    return Splits(
        train=TensorLoader(readings[:1280], gesture[:1280], batch_size=batch_size, shuffle=True),
        val=TensorLoader(readings[1280:], gesture[1280:], batch_size=80),
    )
