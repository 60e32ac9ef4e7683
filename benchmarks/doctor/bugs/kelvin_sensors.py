import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Task(forge.TaskModule):
    """Temperature in kelvin from eight sensor voltages."""

    def __init__(self, hidden: int = 64, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(8, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1)
        )

    def forward(self, volts):
        return 288.0 + self.net(volts).squeeze(1)

    def training_step(self, batch):
        volts, kelvin = batch
        prediction = self(volts)
        loss = F.mse_loss(prediction.to(torch.bfloat16), kelvin.to(torch.bfloat16))
        return {"loss": loss.float()}

    def validation_step(self, batch):
        volts, kelvin = batch
        return {"loss": F.mse_loss(self(volts), kelvin)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(32)
    volts = torch.randn(1400, 8, generator=g)
    direction = torch.randn(8, generator=g) / 2.8
    kelvin = 288.0 + 1.2 * torch.tanh(volts @ direction * 1.5) + 0.3 * volts[:, 0] * volts[:, 1]
    kelvin = kelvin + 0.1 * torch.randn(1400, generator=g)
    dataset = TensorDataset(volts, kelvin)
    train, val = random_split(dataset, [1120, len(dataset) - 1120], generator=torch.Generator().manual_seed(24))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
