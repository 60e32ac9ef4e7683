import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Flowers drawn with three to six petals."""

    def __init__(self, width: int = 16, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.4), nn.Linear(32 * width, 4))

    def forward(self, x):
        return self.head(self.body(x))

    def accuracy(self, x, y):
        self.eval()
        with torch.no_grad():
            return (self(x).argmax(1) == y).float().mean()

    def training_step(self, batch):
        x, y = batch
        accuracy = self.accuracy(x, y)
        return {"loss": F.cross_entropy(self(x), y), "accuracy": accuracy}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(96)
    n = 600
    y = torch.randint(4, (n,), generator=g)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
    r, angle = (xx**2 + yy**2).sqrt(), torch.atan2(yy, xx)
    turn = 6.28 * torch.rand(n, 1, 1, generator=g)
    edge = 0.55 + 0.3 * torch.cos((y + 3).view(n, 1, 1) * angle + turn)
    x = (r < edge).float() + 0.3 * torch.randn(n, 16, 16, generator=g)
    x = ((x - x.mean()) / x.std()).unsqueeze(1)
    train = TensorDataset(x[:480], y[:480])
    val = TensorDataset(x[480:], y[480:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
