import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Five kinds of rock from their spectra."""

    def __init__(self, hidden: int = 48, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.conv = nn.Sequential(nn.Conv1d(1, 16, 5, padding=2), nn.ReLU(), nn.AvgPool1d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 16, hidden), nn.ReLU(), nn.Linear(hidden, 5))

    def forward(self, x):
        return self.head(self.conv(x.unsqueeze(1)))

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(78)
    bands = torch.arange(32.0)
    spectra, kinds = [], []
    for kind, centre in enumerate((6.0, 11.0, 16.0, 21.0, 26.0)):
        middle = centre + 1.5 * torch.randn(200, 1, generator=g)
        spectra.append(2 * torch.exp(-((bands - middle) ** 2) / 18) + 0.6 * torch.randn(200, 32, generator=g))
        kinds += [kind] * 200
    x, y = torch.cat(spectra), torch.tensor(kinds)
    x = (x - x.mean()) / x.std()
    cut = int(0.8 * len(x))
    return Splits(
        train=TensorLoader(x[:cut], y[:cut], batch_size=32, shuffle=True),
        val=TensorLoader(x[cut:], y[cut:], batch_size=32),
    )
