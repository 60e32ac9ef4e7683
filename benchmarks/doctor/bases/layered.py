import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Net(nn.Module):
    def __init__(self, hidden: int = 56):
        super().__init__()
        self.layer1 = nn.Linear(17, hidden)
        self.layer2 = nn.Linear(hidden, hidden)
        self.layer3 = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 5)

    def forward(self, x):
        h = F.relu(self.layer1(x))
        h = F.relu(self.layer2(h))
        h = F.relu(self.layer3(h))
        return self.out(h)


class Task(forge.TaskModule):
    """Flaws in bricks, of five kinds, from sound."""

    def __init__(self, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = Net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(83)
    x = torch.randn(1300, 17, generator=g)
    teacher = torch.randn(17, 16, generator=g) / 4
    y = (torch.tanh(2 * x @ teacher) @ torch.randn(16, 5, generator=g)).argmax(1)
    return Splits(
        train=TensorLoader(x[:1040], y[:1040], batch_size=32, shuffle=True),
        val=TensorLoader(x[1040:], y[1040:], batch_size=65),
    )
