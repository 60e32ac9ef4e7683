import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Embed measurements so that those of one person are close together."""

    def __init__(self, width: int = 16, margin: float = 0.5, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.margin = margin
        self.embed = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, x):
        return F.normalize(self.embed(x), dim=1)

    def training_step(self, batch):
        anchor, other, same = batch
        anchor, other, same = self(anchor), self(other), self(same)
        loss = F.triplet_margin_loss(anchor, other, same, margin=self.margin)
        closer = (anchor - same).norm(dim=1) < (anchor - other).norm(dim=1)
        return {"loss": loss, "ranked": closer.float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    """Triplets (anchor, another person, the same person)."""
    g = torch.Generator().manual_seed(17)
    people = torch.randn(60, 8, generator=g)
    lift = torch.randn(8, 24, generator=g) / 2.8
    who = torch.randint(60, (1500,), generator=g)
    someone = (who + torch.randint(1, 60, (1500,), generator=g)) % 60

    def measure(person):
        pose = 0.5 * torch.randn(len(person), 8, generator=g)
        return (people[person] + pose) @ lift + 0.3 * torch.randn(len(person), 24, generator=g)

    anchor, other, same = measure(who), measure(someone), measure(who)
    return Splits(
        train=TensorLoader(anchor[:1200], other[:1200], same[:1200], batch_size=32, shuffle=True),
        val=TensorLoader(anchor[1200:], other[1200:], same[1200:], batch_size=32),
    )
