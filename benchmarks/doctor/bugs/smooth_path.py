import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Recover a smooth track from noisy readings."""

    def __init__(self, channels: int = 24, smooth: float = 0.2, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.smooth = smooth
        self.net = nn.Sequential(
            nn.Conv1d(2, channels, 5, padding=2),
            nn.GELU(),
            nn.Conv1d(channels, channels, 5, padding=2),
            nn.GELU(),
            nn.Conv1d(channels, 1, 5, padding=2),
        )

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, track = batch
        output = self(x)
        fit = F.mse_loss(output, track)
        roughness = output.diff(dim=1).square().mean()
        return {"loss": fit - self.smooth * roughness, "fit": fit, "roughness": roughness}

    def validation_step(self, batch):
        x, track = batch
        return {"loss": F.mse_loss(self(x), track)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(35)
    steps = 0.35 * torch.randn(800, 40, generator=g)
    track = F.avg_pool1d(steps.cumsum(1).unsqueeze(1), 5, 1, 2).squeeze(1)
    track = (track - track.mean()) / track.std()
    x = torch.stack([track, track], 1) + torch.tensor([0.4, 0.8]).view(2, 1) * torch.randn(800, 2, 40, generator=g)
    train = TensorDataset(x[:640], track[:640])
    val = TensorDataset(x[640:], track[640:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
