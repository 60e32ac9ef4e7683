import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Recognise six leaves by eight measurements."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(8, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 6),
        )

    def forward(self, leaf):
        return self.net(leaf)

    def training_step(self, batch):
        leaf, species = batch
        logits = self(leaf)
        return {"loss": F.cross_entropy(logits, species), "accuracy": (logits.argmax(1) == species).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def leaves(per_species: int, centres: torch.Tensor, g: torch.Generator) -> TensorDataset:
    groups = [centre + torch.randn(per_species, 8, generator=g) for centre in centres]
    species = torch.arange(6).repeat_interleave(per_species)
    return TensorDataset(torch.cat(groups) / 1.5, species)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(13)
    centres = 1.2 * torch.randn(6, 8, generator=g)
    return Splits(
        train=DataLoader(leaves(192, centres, g), batch_size=batch_size),
        val=DataLoader(leaves(50, centres, g), batch_size=100),
    )
