import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Task(forge.TaskModule):
    """Embed measurements so that those of one person are close together."""

    def __init__(self, width: int = 16, margin: float = 0.5, lr: float = 1e-3):
        super().__init__()
        self.lr, self.margin = lr, margin
        self.embed = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, x):
        return F.normalize(self.embed(x), dim=1)

    def training_step(self, batch):
        anchor, same, other = (self(part) for part in batch)
        loss = F.triplet_margin_loss(anchor, same, other, margin=self.margin)
        closer = (anchor - same).norm(dim=1) < (anchor - other).norm(dim=1)
        return {"loss": loss, "ranked": closer.float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(17)
    people = torch.randn(60, 24, generator=g)
    who = torch.randint(60, (1500,), generator=g)
    someone = (who + torch.randint(1, 60, (1500,), generator=g)) % 60
    rows = [people[person] + 0.7 * torch.randn(1500, 24, generator=g) for person in (who, who, someone)]
    return Splits(
        train=TensorLoader(*(row[:1200] for row in rows), batch_size=32, shuffle=True),
        val=TensorLoader(*(row[1200:] for row in rows), batch_size=60),
    )
