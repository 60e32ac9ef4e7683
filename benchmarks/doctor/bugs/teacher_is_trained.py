import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


def load_teacher(seed: int = 100) -> nn.Sequential:
    """The large network that labelled the data."""
    teacher = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 7))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer, scale in ((teacher[0], 0.4), (teacher[2], 0.35)):
            layer.weight.copy_(scale * torch.randn(layer.weight.shape, generator=g))
            layer.bias.zero_()
    return teacher.eval()


class Task(forge.TaskModule):
    """Distil a wide network into a narrow one."""

    def __init__(self, hidden: int = 32, lr: float = 3e-3, temperature: float = 2.0, share: float = 0.7):
        super().__init__()
        self.lr = lr
        self.temperature = temperature
        self.share = share
        self.teacher = load_teacher()
        self.student = nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 7))

    def forward(self, x):
        return self.student(x)

    def training_step(self, batch):
        x, label = batch
        logits = self.student(x)
        guide = self.teacher(x)
        soft = F.kl_div(
            F.log_softmax(logits / self.temperature, dim=1),
            F.log_softmax(guide / self.temperature, dim=1),
            reduction="batchmean",
            log_target=True,
        )
        hard = F.cross_entropy(logits, label)
        loss = self.share * self.temperature**2 * soft + (1 - self.share) * hard
        return {"loss": loss, "soft": soft, "accuracy": (logits.argmax(1) == label).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 64) -> Splits:
    g = torch.Generator().manual_seed(50)
    x = torch.randn(1600, 16, generator=g)
    with torch.no_grad():
        scores = load_teacher()(x)
    label = torch.multinomial(scores.softmax(1), 1, generator=g).squeeze(1)
    return Splits(
        train=TensorLoader(x[:1280], label[:1280], batch_size=batch_size, shuffle=True),
        val=TensorLoader(x[1280:], label[1280:], batch_size=80),
    )
