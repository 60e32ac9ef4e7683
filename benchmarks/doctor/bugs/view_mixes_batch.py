import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class PatchNet(nn.Module):
    """Encodes four patches of a measurement with one network and joins the codes."""

    def __init__(self, patch: int = 10, width: int = 16, classes: int = 4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(patch, 48), nn.ReLU(), nn.Linear(48, width), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(4 * width, 48), nn.ReLU(), nn.Linear(48, classes))

    def forward(self, patches):
        codes = torch.stack([self.encoder(patches[:, i]) for i in range(4)])
        return self.head(codes.view(len(patches), -1))


class Task(forge.TaskModule):
    """Classify measurements that come in four patches."""

    def __init__(self, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = PatchNet()

    def forward(self, patches):
        return self.net(patches)

    def training_step(self, batch):
        patches, kind = batch
        logits = self(patches)
        return {"loss": F.cross_entropy(logits, kind), "accuracy": (logits.argmax(1) == kind).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(86)
    kind = torch.randint(4, (1400,), generator=g)
    templates = torch.randn(4, 4, 10, generator=g)
    gain = 0.7 + 0.6 * torch.rand(1400, 1, 1, generator=g)
    patches = gain * templates[kind] + 2.2 * torch.randn(1400, 4, 10, generator=g)
    patches = (patches - patches[:1120].mean()) / patches[:1120].std()
    return Splits(
        train=TensorLoader(patches[:1120], kind[:1120], batch_size=batch_size, shuffle=True),
        val=TensorLoader(patches[1120:], kind[1120:], batch_size=70),
    )
