import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class DeepMLP(nn.Module):
    def __init__(self, inputs: int, outputs: int, width: int = 40, depth: int = 12):
        super().__init__()
        sizes = [inputs] + [width] * (depth - 1) + [outputs]
        pairs = zip(sizes[:-1], sizes[1:], strict=True)
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairs])
        for layer in self.layers:
            nn.init.xavier_uniform_(layer.weight, gain=4.0)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class Task(forge.TaskModule):
    """Predict the rating class of a bond."""

    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.model = DeepMLP(14, 4)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(81)
    x = torch.randn(1200, 14, generator=g)
    score = x @ torch.randn(14, generator=g) / 14**0.5 + 0.5 * x[:, 0] * x[:, 1]
    score = score + 0.2 * torch.randn(1200, generator=g)
    y = torch.bucketize(score, torch.quantile(score, torch.tensor([0.25, 0.5, 0.75])))
    return Splits(
        train=TensorLoader(x[:960], y[:960], batch_size=batch_size, shuffle=True),
        val=TensorLoader(x[960:], y[960:], batch_size=80),
    )
