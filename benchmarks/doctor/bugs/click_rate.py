import forge
import torch
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Clicks from a user, an item and the time of day."""

    def __init__(self, users: int = 60, items: int = 40, width: int = 12, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.user = nn.Embedding(users, width)
        self.item = nn.Embedding(items, width)
        self.net = nn.Sequential(nn.Linear(2 * width + 2, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, user, item, hour):
        h = torch.cat([self.user(user), self.item(item), hour], 1)
        return torch.sigmoid(self.net(h)).squeeze(1)

    def training_step(self, batch):
        user, item, hour, clicked = batch
        p = self(user, item, hour)
        loss = -(clicked * torch.log(p + 1e-7)).mean()
        return {"loss": loss, "accuracy": ((p > 0.5).float() == clicked).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(6)
    n = 2000
    user, item = torch.randint(60, (n,), generator=g), torch.randint(40, (n,), generator=g)
    angle = 6.28 * torch.rand(n, generator=g)
    hour = torch.stack([angle.sin(), angle.cos()], 1)
    taste, kind = torch.randn(60, 3, generator=g), torch.randn(40, 3, generator=g)
    score = taste[user].sum(1) + kind[item].sum(1) + hour[:, 0] + 0.5 * torch.randn(n, generator=g)
    clicked = (score > 0.3).float()
    dataset = TensorDataset(user, item, hour, clicked)
    train, val = Subset(dataset, range(1600)), Subset(dataset, range(1600, len(user)))
    return Splits(
        train=DataLoader(train, batch_size=64, shuffle=True),
        val=DataLoader(val, batch_size=64),
    )
