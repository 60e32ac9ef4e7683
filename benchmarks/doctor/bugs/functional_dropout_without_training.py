import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ConvNet(nn.Module):
    def __init__(self, classes: int = 4, p: float = 0.4):
        super().__init__()
        self.p = p
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.fc1 = nn.Linear(24 * 9, 64)
        self.fc2 = nn.Linear(64, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, self.p)
        return self.fc2(x)


class Task(forge.TaskModule):
    """Say in which corner of a noisy picture the bright spot is."""

    def __init__(self, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = ConvNet()

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch):
        images, corner = batch
        logits = self(images)
        return {"loss": F.cross_entropy(logits, corner), "accuracy": (logits.argmax(1) == corner).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(52)
    place = torch.randint(1, 11, (1000, 2), generator=g)
    corner = 2 * (place[:, 0] > 5).long() + (place[:, 1] > 5).long()
    grid = torch.arange(12)
    rows = (grid.view(1, 12, 1) - place[:, 0].view(-1, 1, 1)).abs() <= 1
    columns = (grid.view(1, 1, 12) - place[:, 1].view(-1, 1, 1)).abs() <= 1
    images = 1.5 * (rows & columns).float() + 0.8 * torch.randn(1000, 12, 12, generator=g)
    images = ((images - images[:800].mean()) / images[:800].std()).unsqueeze(1)
    return Splits(
        train=DataLoader(TensorDataset(images[:800], corner[:800]), batch_size=batch_size, shuffle=True),
        val=DataLoader(TensorDataset(images[800:], corner[800:]), batch_size=50),
    )
