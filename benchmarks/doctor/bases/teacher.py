import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Teacher(nn.Module):
    """A large network that was trained elsewhere."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(100)
        self.first = nn.Parameter(0.4 * torch.randn(16, 128, generator=g))
        self.last = nn.Parameter(0.35 * torch.randn(128, 6, generator=g))

    def forward(self, x):
        return torch.tanh(x @ self.first) @ self.last


class Task(forge.TaskModule):
    """Distil a wide network into a narrow one."""

    def __init__(self, hidden: int = 32, lr: float = 3e-3, heat: float = 2.0):
        super().__init__()
        self.lr, self.heat = lr, heat
        self.teacher = Teacher().requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 6))

    def forward(self, x):
        return self.student(x)

    def training_step(self, batch):
        x, label = batch
        logits = self(x)
        wanted = (self.teacher(x) / self.heat).log_softmax(1)
        soft = F.kl_div((logits / self.heat).log_softmax(1), wanted, reduction="batchmean", log_target=True)
        loss = 0.7 * self.heat**2 * soft + 0.3 * F.cross_entropy(logits, label)
        return {"loss": loss, "accuracy": (logits.argmax(1) == label).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(50)
    x = torch.randn(1600, 16, generator=g)
    with torch.no_grad():
        label = torch.multinomial(Teacher()(x).softmax(1), 1, generator=g).squeeze(1)
    return Splits(
        train=TensorLoader(x[:1280], label[:1280], batch_size=64, shuffle=True),
        val=TensorLoader(x[1280:], label[1280:], batch_size=80),
    )
