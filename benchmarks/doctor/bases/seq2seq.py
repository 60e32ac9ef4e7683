import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader

WORDS = 24


class Task(forge.TaskModule):
    """Turn a sequence round: encoder, decoder and attention, with teacher forcing."""

    def __init__(self, width: int = 32, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.source, self.target = nn.Embedding(WORDS, width), nn.Embedding(WORDS + 1, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRUCell(2 * width, width)
        self.query = nn.Linear(width, width)
        self.head = nn.Linear(2 * width, WORDS)

    def forward(self, source, previous):
        memory, state = self.encoder(self.source(source))
        state, outputs = state[0], []
        for t in range(previous.size(1)):
            weights = (memory @ self.query(state)[:, :, None] / 32**0.5).softmax(1)
            context = (weights * memory).sum(1)
            state = self.decoder(torch.cat([self.target(previous[:, t]), context], 1), state)
            outputs.append(self.head(torch.cat([state, context], 1)))
        return torch.stack(outputs, 1)

    def shifted(self, target):
        return torch.cat([torch.full_like(target[:, :1], WORDS), target[:, :-1]], 1)

    def training_step(self, batch):
        source, target = batch
        logits = self(source, self.shifted(target))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), target.flatten())}

    def validation_step(self, batch):
        source, target = batch
        words = torch.full_like(target[:, :1], WORDS)
        for _ in range(target.size(1)):
            words = torch.cat([words, self(source, words)[:, -1].argmax(-1, keepdim=True)], 1)
        return {"free_running_accuracy": (words[:, 1:] == target).float().mean()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    source = torch.randint(WORDS, (300, 6), generator=torch.Generator().manual_seed(6))
    target = source.flip(1)
    return Splits(
        train=TensorLoader(source[:252], target[:252], batch_size=16, shuffle=True),
        val=TensorLoader(source[252:], target[252:], batch_size=16),
    )
