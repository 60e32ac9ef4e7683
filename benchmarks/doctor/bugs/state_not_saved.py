import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class TwoHeads(nn.Module):
    def __init__(self, width: int = 12):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU()
        )
        self.kind = nn.Linear(width * 36, 3)
        self.place = nn.Linear(width * 36, 2)

    def forward(self, images):
        h = self.features(images).flatten(1)
        return self.kind(h), self.place(h)


class Task(forge.TaskModule):
    """Name a shape and find its centre; each loss counts relative to its running mean."""

    def __init__(self, lr: float = 1e-3, decay: float = 0.98):
        super().__init__()
        self.lr = lr
        self.decay = decay
        self.net = TwoHeads()
        self.typical = [1.0, 1.0]

    def forward(self, images):
        return self.net(images)

    def losses(self, batch):
        images, kind, place = batch
        logits, found = self(images)
        hits = (logits.argmax(1) == kind).float().mean()
        return [F.cross_entropy(logits, kind), F.mse_loss(found, place)], hits

    def training_step(self, batch):
        losses, hits = self.losses(batch)
        for i, loss in enumerate(losses):
            self.typical[i] = self.decay * self.typical[i] + (1 - self.decay) * loss.item()
        total = sum(loss / typical for loss, typical in zip(losses, self.typical, strict=True))
        return {"loss": total, "kind_loss": losses[0], "place_loss": losses[1], "accuracy": hits}

    def validation_step(self, batch):
        losses, hits = self.losses(batch)
        return {"loss": losses[0] + losses[1], "kind_loss": losses[0], "place_loss": losses[1], "accuracy": hits}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(35)
    kind = torch.randint(3, (900,), generator=g)
    place = torch.randint(2, 10, (900, 2), generator=g)
    grid = torch.arange(12)
    rows = (grid.view(1, 12, 1) - place[:, 0].view(-1, 1, 1)).abs()
    columns = (grid.view(1, 1, 12) - place[:, 1].view(-1, 1, 1)).abs()
    square = torch.maximum(rows, columns) <= 2
    cross = ((rows == 0) | (columns == 0)) & square
    diamond = rows + columns <= 2
    shapes = torch.stack([square, cross, diamond], dim=1)[torch.arange(900), kind]
    images = (2 * shapes.float() - 0.2 + 0.4 * torch.randn(shapes.shape, generator=g)).unsqueeze(1)
    place = (place - 5.5) / 2.3
    return Splits(
        train=TensorLoader(images[:720], kind[:720], place[:720], batch_size=batch_size, shuffle=True),
        val=TensorLoader(images[720:], kind[720:], place[720:], batch_size=60),
    )
