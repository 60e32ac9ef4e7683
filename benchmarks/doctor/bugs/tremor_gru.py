import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Detect a tremor in a window of a sensor."""

    evaluation = "no_grad"

    def __init__(self, hidden: int = 32, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.gru = nn.GRU(2, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 2)
        self.state = None

    def forward(self, x):
        if self.state is None or self.state.shape[1] != len(x):
            self.state = x.new_zeros(1, len(x), self.gru.hidden_size)
        h, state = self.gru(x, self.state)
        self.state = state.detach().clone()
        return self.out(h[:, -1])

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(72)
    n = 960
    y = torch.randint(2, (n,), generator=g)
    t = torch.arange(12.0)
    slow = torch.sin(0.2 * t + 6.28 * torch.rand(n, 1, generator=g))
    tremor = torch.sin(2.2 * t + 6.28 * torch.rand(n, 1, generator=g)) * y.unsqueeze(1)
    x = torch.stack([slow + 0.6 * tremor, slow - 0.6 * tremor], 2) + 0.4 * torch.randn(n, 12, 2, generator=g)
    dataset = TensorDataset(x, y)
    train, val = Subset(dataset, range(768)), Subset(dataset, range(768, len(x)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
