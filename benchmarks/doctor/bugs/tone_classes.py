import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: float = -4.0):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        nn.init.kaiming_uniform_(self.linear.weight, nonlinearity="relu")
        nn.init.constant_(self.linear.bias, bias)

    def forward(self, x):
        return F.relu(self.linear(x))


class Task(forge.TaskModule):
    """Sparse features of a signal for its class."""

    def __init__(self, hidden: int = 64, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(Layer(26, hidden), Layer(hidden, hidden), nn.Linear(hidden, 4))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(44)
    y = torch.randint(4, (1200,), generator=g)
    t = torch.arange(26.0)
    pitch = torch.tensor([0.3, 0.5, 0.8, 1.2])[y].unsqueeze(1) + 0.03 * torch.randn(1200, 1, generator=g)
    x = torch.sin(pitch * t + 1.5 * torch.rand(1200, 1, generator=g)) + 0.5 * torch.randn(1200, 26, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    dataset = TensorDataset(x, y)
    train, val = random_split(dataset, [960, len(dataset) - 960], generator=torch.Generator().manual_seed(36))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
