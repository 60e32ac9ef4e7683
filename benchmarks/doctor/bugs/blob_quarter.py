import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Which quarter of the picture holds the blob."""

    def __init__(self, width: int = 12, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 9, 4),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(77)
    n = 800
    centre = 1 + 9 * torch.rand(n, 2, generator=g)
    yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    distance = (xx - centre[:, :1, None]).square() + (yy - centre[:, 1:, None]).square()
    images = torch.exp(-distance / 4) + 0.2 * torch.randn(n, 12, 12, generator=g)
    labels = (centre[:, 0] > 5.5).long() + 2 * (centre[:, 1] > 5.5).long()
    order = torch.randperm(n, generator=g)
    images = ((images - images.mean()) / images.std())[order].unsqueeze(1)
    train = TensorDataset(images[:640], labels[:640])
    val = TensorDataset(images[640:], labels[640:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
