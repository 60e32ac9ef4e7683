import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Task(forge.TaskModule):
    """The next word of a text."""

    def __init__(self, words: int = 40, width: int = 32, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(words, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, words, bias=False)

    def forward(self, text):
        return self.out(self.lstm(self.embed(text))[0])

    def training_step(self, batch):
        text, following = batch
        logits = self(text)
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
        return {"loss": loss, "accuracy": (logits.argmax(-1) == following).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(53)
    chain = torch.softmax(2.5 * torch.randn(40, 40, generator=g), dim=-1)
    text = torch.randint(40, (900, 13), generator=g)
    for t in range(1, 13):
        text[:, t] = torch.multinomial(chain[text[:, t - 1]], 1, generator=g).squeeze(1)
    inputs, following = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return Splits(
        train=TensorLoader(inputs[:720], following[:720], batch_size=32, shuffle=True),
        val=TensorLoader(inputs[720:], following[720:], batch_size=60),
    )
