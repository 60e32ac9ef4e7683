import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """A character model over words of a made-up language."""

    def __init__(self, letters: int = 15, width: int = 32, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.embedding = nn.Embedding(letters, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, letters)

    def forward(self, word):
        return self.out(self.lstm(self.embedding(word))[0])

    def training_step(self, batch):
        word, following = batch
        logits = self(word)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), following.flatten())}

    def validation_step(self, batch):
        word, following = batch
        logits = self(word)
        nll = F.cross_entropy(logits.flatten(0, 1), following.flatten())
        return {"loss": nll, "accuracy": (logits.argmax(-1) == following).float().mean()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(7)
    chain = torch.softmax(2.5 * torch.randn(15, 15, 15, generator=g), dim=-1)
    words = [torch.randint(15, (1000,), generator=g), torch.randint(15, (1000,), generator=g)]
    for _ in range(9):
        words.append(torch.multinomial(chain[words[-2], words[-1]], 1, generator=g).squeeze(1))
    words = torch.stack(words, dim=1)
    inputs, following = words[:, :-1].contiguous(), words[:, 1:].contiguous()
    return Splits(
        train=TensorLoader(inputs[:800], following[:800], batch_size=batch_size, shuffle=True),
        val=TensorLoader(inputs[800:], following[800:], batch_size=50),
    )
