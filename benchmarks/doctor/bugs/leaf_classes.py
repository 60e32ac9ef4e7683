import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Leaf species from margins and textures."""

    def __init__(self, hidden: int = 80, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.criterion = nn.NLLLoss()
        self.net = nn.Sequential(
            nn.Linear(16, hidden),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 9),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        probabilities = F.softmax(self(x), dim=1)
        loss = self.criterion(probabilities, y)
        return {"loss": loss, "accuracy": (probabilities.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def data() -> Splits:
    g = torch.Generator().manual_seed(24)
    y = torch.randint(9, (1400,), generator=g)
    centres = 1.2 * torch.randn(9, 2, 16, generator=g)
    which = torch.randint(2, (1400,), generator=g)
    x = centres[y, which] + torch.randn(1400, 16, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    return Splits(
        train=TensorLoader(x[:1100], y[:1100], batch_size=32, shuffle=True),
        val=TensorLoader(x[1100:], y[1100:], batch_size=32),
    )
