import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn

PAD = 0


class AttentionPool(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.score = nn.Linear(width, 1)

    def forward(self, h, mask):
        scores = self.score(torch.tanh(h)).squeeze(-1)
        scores = scores.masked_fill(mask, -1e9)
        return (scores.softmax(1).unsqueeze(-1) * h).sum(1)


class Task(forge.TaskModule):
    """Cuisine of a menu, a list of dishes of varying length."""

    def __init__(self, dishes: int = 91, width: int = 32, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(dishes, width)
        self.hidden = nn.Linear(width, width)
        self.pool = AttentionPool(width)
        self.out = nn.Linear(width, 5)

    def forward(self, menu):
        h = F.relu(self.hidden(self.embed(menu)))
        return self.out(self.pool(h, menu != PAD))

    def training_step(self, batch):
        menu, y = batch
        logits = self(menu)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(4)
    y = torch.randint(5, (1300,), generator=g)
    likely = torch.softmax(1.3 * torch.randn(5, 90, generator=g), 1)
    menu = 1 + torch.multinomial(likely[y], 14, replacement=True, generator=g)
    length = torch.randint(5, 14, (1300, 1), generator=g)
    menu = menu * (torch.arange(14) < length)
    return Splits(
        train=TensorLoader(menu[:1040], y[:1040], batch_size=32, shuffle=True),
        val=TensorLoader(menu[1040:], y[1040:], batch_size=32),
    )
