import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Predict the next word, with tied embeddings."""

    def __init__(self, words: int = 40, width: int = 32, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.embedding = nn.Embedding(words, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight.data = self.embedding.weight.data

    def forward(self, text):
        return self.out(self.rnn(self.embedding(text))[0])

    def training_step(self, batch):
        text, following = batch
        return {"loss": F.cross_entropy(self(text).flatten(0, 1), following.flatten())}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(53)
    chain = torch.softmax(2.5 * torch.randn(40, 40, generator=g), dim=-1)
    words = [torch.randint(40, (900,), generator=g)]
    for _ in range(12):
        words.append(torch.multinomial(chain[words[-1]], 1, generator=g).squeeze(1))
    text = torch.stack(words, dim=1)
    inputs, following = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return Splits(
        train=TensorLoader(inputs[:720], following[:720], batch_size=32, shuffle=True),
        val=TensorLoader(inputs[720:], following[720:], batch_size=60),
    )
