import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Task(forge.TaskModule):
    """Half of the samples have no label: a slow average of the student gives targets for them."""

    def __init__(self, decay: float = 0.95, lr: float = 5e-3):
        super().__init__()
        self.decay, self.lr = decay, lr
        self.student = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 3))
        self.teacher = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 3)).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    @torch.no_grad()
    def move_teacher(self):
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.copy_(self.decay * old + (1 - self.decay) * new)

    def training_step(self, batch):
        x, y, labelled = batch
        self.move_teacher()
        logits = self.student(x + 0.1 * torch.randn_like(x))
        with torch.no_grad():
            wanted = self.teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
        supervised = F.cross_entropy(logits[labelled], y[labelled])
        return {"loss": supervised + F.mse_loss(logits.softmax(1), wanted), "supervised": supervised.detach()}

    def validation_step(self, batch):
        x, y, _ = batch
        logits = self.teacher(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.student.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(41)
    y = torch.randint(3, (640,), generator=g)
    x = torch.randn(3, 10, generator=g)[y] + torch.randn(640, 10, generator=g)
    rows = x, y, (torch.rand(640, generator=g) < 0.5) | (torch.arange(640) >= 512)
    return Splits(
        train=TensorLoader(*(row[:512] for row in rows), batch_size=32, shuffle=True),
        val=TensorLoader(*(row[512:] for row in rows), batch_size=32),
    )
