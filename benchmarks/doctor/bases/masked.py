import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader

WORDS, LENGTH, MASK = 40, 16, 40


class Task(forge.TaskModule):
    """Fill in masked words with a small transformer."""

    def __init__(self, width: int = 48, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(WORDS + 1, width)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(width, WORDS + 1)

    def forward(self, words):
        return self.out(self.encoder(self.embed(words) + self.place))

    def training_step(self, batch):
        (words,) = batch
        hidden = torch.rand(words.shape, device=words.device) < 0.2
        hidden[:, 0] = True
        labels = words.masked_fill(~hidden, -100)
        logits = self(words.masked_fill(hidden, MASK))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)}

    def validation_step(self, batch):
        (words,) = batch
        hidden = torch.arange(LENGTH, device=words.device).expand_as(words) % 5 == 2
        logits = self(words.masked_fill(hidden, MASK))[hidden]
        right = (logits.argmax(1) == words[hidden]).float().mean()
        return {"loss": F.cross_entropy(logits, words[hidden]), "accuracy": right}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(27)
    start, stride = torch.randint(40, (1000, 1), generator=g), torch.randint(1, 5, (1000, 1), generator=g)
    words = (start + stride * torch.arange(LENGTH)) % 40
    noise = torch.rand(words.shape, generator=g) < 0.05
    words = torch.where(noise, torch.randint(40, words.shape, generator=g), words)
    return Splits(
        train=TensorLoader(words[:800], batch_size=32, shuffle=True), val=TensorLoader(words[800:], batch_size=40)
    )
