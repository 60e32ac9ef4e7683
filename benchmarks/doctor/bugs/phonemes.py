import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Recordings(Dataset):
    def __init__(self, frames, labels, mean, std):
        self.frames = frames
        self.labels = labels
        self.mean = mean
        self.std = std

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        frame = self.frames[i]
        frame -= self.mean
        frame /= self.std
        return frame, self.labels[i]


class Task(forge.TaskModule):
    def __init__(self, hidden: int = 64, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(22, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 7)
        )

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
    g = torch.Generator().manual_seed(53)
    labels = torch.randint(7, (1200,), generator=g)
    centres = torch.randn(7, 22, generator=g)
    frames = 3.0 + 2.0 * (centres[labels] + 1.2 * torch.randn(1200, 22, generator=g))
    mean, std = frames[:960].mean(0), frames[:960].std(0)
    train = Recordings(frames[:960].clone(), labels[:960], mean, std)
    val = Recordings(frames[960:].clone(), labels[960:], mean, std)
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=48))
