import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sounds(Dataset):
    """Spectra of recordings, computed again whenever one is read."""

    def __init__(self, tones, first: int):
        self.tones = tones
        self.first = first

    def __len__(self):
        return len(self.tones)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.first + i)
        time = torch.arange(65536.0)
        wave = torch.sin(time * (0.02 + 0.01 * self.tones[i])) + torch.randn(65536, generator=g)
        spectrum = torch.fft.rfft(wave).abs()[:640].view(32, 20).mean(1)
        return spectrum.log(), self.tones[i]


class Task(forge.TaskModule):
    """Four tones from their spectra."""

    def __init__(self, hidden: int = 32, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, hidden), nn.ReLU(), nn.Linear(hidden, 4))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.cross_entropy(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    tones = torch.randint(4, (320,), generator=torch.Generator().manual_seed(59))
    return Splits(
        train=DataLoader(Sounds(tones[:256], 0), batch_size=16, shuffle=True),
        val=DataLoader(Sounds(tones[256:], 256), batch_size=16),
    )
