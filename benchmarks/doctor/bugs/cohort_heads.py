import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class RegionHeads:
    """One small regression head per region."""

    def __init__(self, regions: int, hidden: int):
        self.regions = regions
        self.layers = [nn.Sequential(nn.Linear(hidden, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(regions)]

    def __call__(self, h, region):
        outputs = torch.cat([layer(h) for layer in self.layers], 1)
        return outputs.gather(1, region.unsqueeze(1)).squeeze(1)


class Task(forge.TaskModule):
    def __init__(self, hidden: int = 48, regions: int = 5, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.trunk = nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.heads = RegionHeads(regions, hidden)

    def forward(self, x, region):
        return self.heads(self.trunk(x), region)

    def training_step(self, batch):
        x, region, y = batch
        prediction = self(x, region)
        return {"loss": F.smooth_l1_loss(prediction, y), "mae": (prediction - y).abs().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(94)
    x = torch.randn(1400, 10, generator=g)
    region = torch.randint(5, (1400,), generator=g)
    slopes = torch.randn(5, 10, generator=g) / 3
    y = (x * slopes[region]).sum(1) + 0.4 * torch.tanh(x[:, 0] * x[:, 1]) + 0.15 * torch.randn(1400, generator=g)
    y = (y - y.mean()) / y.std()
    dataset = TensorDataset(x, region, y)
    train, val = Subset(dataset, range(1120)), Subset(dataset, range(1120, len(x)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
