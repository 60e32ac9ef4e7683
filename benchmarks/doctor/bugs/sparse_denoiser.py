import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Denoise a signal; a sparsity penalty on the code keeps it short."""

    def __init__(self, width: int = 32, code: int = 48, lr: float = 0.05, sparsity: float = 0.05):
        super().__init__()
        self.lr = lr
        self.sparsity = sparsity
        self.encoder = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, code), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(code, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch):
        noisy, clean = batch
        code = self.encoder(noisy)
        reconstruction = F.mse_loss(self.decoder(code), clean)
        penalty = self.sparsity * code.abs().mean()
        if self.training:
            penalty.backward(retain_graph=True)
            self.penalty_norm = self.encoder[0].weight.grad.norm()
        return {"loss": reconstruction + penalty, "reconstruction": reconstruction, "penalty": penalty}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def data() -> Splits:
    g = torch.Generator().manual_seed(48)
    t = torch.linspace(0, 6.28, 32)
    frequency = torch.randint(1, 5, (1200, 2), generator=g).float()
    size = torch.randn(1200, 2, generator=g)
    clean = (size.unsqueeze(-1) * torch.sin(frequency.unsqueeze(-1) * t)).sum(1)
    clean = clean / clean.std()
    noisy = clean + 0.4 * torch.randn(clean.shape, generator=g)
    dataset = TensorDataset(noisy, clean)
    train, val = Subset(dataset, range(1000)), Subset(dataset, range(1000, len(noisy)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
