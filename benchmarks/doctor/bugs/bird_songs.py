import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Which of seven birds sings, from a small spectrogram."""

    def __init__(self, width: int = 16, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.out = nn.Linear(8 * width, 1)

    def forward(self, x):
        return self.out(self.features(x)).squeeze(1)

    def training_step(self, batch):
        x, bird = batch
        prediction = self(x)
        loss = F.mse_loss(prediction, bird.float())
        return {"loss": loss, "accuracy": (prediction.round().long() == bird).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(39)
    n = 840
    bird = torch.randint(7, (n,), generator=g)
    songs = torch.rand(7, 12, 16, generator=g) < 0.18
    shift = torch.randint(16, (n,), generator=g)
    columns = (torch.arange(16) + shift.unsqueeze(1)) % 16
    x = songs[bird].float().gather(2, columns.unsqueeze(1).expand(n, 12, 16))
    x = (x - x.mean()) / x.std() + 0.5 * torch.randn(x.shape, generator=g)
    x = x.unsqueeze(1)
    dataset = TensorDataset(x, bird)
    train, val = Subset(dataset, range(672)), Subset(dataset, range(672, len(x)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
