import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Predict the next note of a melody."""

    def __init__(self, notes: int = 24, width: int = 32, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(notes, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, notes)

    def forward(self, notes):
        h, _ = self.lstm(self.embed(notes))
        return self.out(h)

    def training_step(self, batch):
        (melody,) = batch
        logits = self(melody[:, :-1])
        target = melody[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        return {"loss": loss, "accuracy": (logits.argmax(-1) == target).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(34)
    steps = torch.tensor([-3, -1, 1, 2, 4])
    weights = torch.softmax(1.5 * torch.randn(24, 5, generator=g), 1)
    melody = torch.randint(24, (700, 1), generator=g)
    for _ in range(20):
        last = melody[:, -1]
        move = steps[torch.multinomial(weights[last], 1, generator=g)]
        melody = torch.cat([melody, (last.unsqueeze(1) + move) % 24], 1)
    train = TensorDataset(melody[:560])
    val = TensorDataset(melody[560:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
