import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset, random_split


class Task(forge.TaskModule):
    """Estimate the joint angle at every time step of walks of different lengths."""

    def __init__(self, hidden: int = 40, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.rnn = nn.GRU(3, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0]).squeeze(-1)

    def training_step(self, batch):
        x, angle, _ = batch
        return {"loss": F.mse_loss(self(x), angle)}

    def validation_step(self, batch):
        x, angle, length = batch
        valid = torch.arange(x.shape[1], device=x.device) < length.unsqueeze(1)
        return {"loss": (self(x) - angle)[valid].square().mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(40)
    walks, angles, lengths = [], [], []
    for _ in range(700):
        n = int(torch.randint(6, 40, (1,), generator=g))
        t = torch.arange(n) * (0.3 + 0.3 * torch.rand(1, generator=g)) + 6.28 * torch.rand(1, generator=g)
        walk = torch.stack([t.sin(), t.cos(), (2 * t).sin()], 1) + 0.2 * torch.randn(n, 3, generator=g)
        walks.append(walk)
        angles.append(1.0 + 0.8 * (t - 0.6).sin() + 0.1 * torch.randn(n, generator=g))
        lengths.append(n)
    x = pad_sequence(walks, batch_first=True)
    angle = pad_sequence(angles, batch_first=True)
    length = torch.tensor(lengths)
    dataset = TensorDataset(x, angle, length)
    train, val = random_split(dataset, [560, len(dataset) - 560], generator=torch.Generator().manual_seed(30))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
