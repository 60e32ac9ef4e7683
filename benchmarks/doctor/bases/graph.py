import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader

NODES, CLASSES, WORDS = 300, 4, 24


def graph():
    g = torch.Generator().manual_seed(71)
    topic = torch.randint(CLASSES, (NODES,), generator=g)
    chance = torch.where(topic[:, None] == topic[None], 0.02, 0.008)
    edges = torch.rand(NODES, NODES, generator=g) < chance
    edges = (edges | edges.T).float().fill_diagonal_(1.0)
    degree = edges.sum(1).rsqrt()
    words = 0.5 * torch.randn(CLASSES, WORDS, generator=g)[topic] + torch.randn(NODES, WORDS, generator=g)
    return words, degree[:, None] * edges * degree[None], topic


class Task(forge.TaskModule):
    """The topics of the papers of a citation graph; a batch names some of its nodes."""

    def __init__(self, hidden: int = 32):
        super().__init__()
        for name, value in zip(("words", "adjacency", "topic"), graph(), strict=True):
            self.register_buffer(name, value)
        self.first, self.last = nn.Linear(WORDS, hidden), nn.Linear(hidden, CLASSES)
        self.drop = nn.Dropout(0.2)

    def forward(self):
        h = F.relu(self.adjacency @ self.first(self.words))
        return self.adjacency @ self.last(self.drop(h))

    def training_step(self, batch):
        (nodes,) = batch
        logits = self()
        right = (logits.argmax(1) == self.topic)[nodes].float().mean()
        return {"loss": F.cross_entropy(logits[nodes], self.topic[nodes]), "accuracy": right}

    def validation_step(self, batch):
        (nodes,) = batch
        logits = self()
        right = (logits.argmax(1) == self.topic)[nodes].float().mean()
        return {"loss": F.cross_entropy(logits[nodes], self.topic[nodes]), "accuracy": right}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, weight_decay=5e-4)


def data() -> Splits:
    nodes = torch.randperm(NODES, generator=torch.Generator().manual_seed(72))
    return Splits(
        train=TensorLoader(nodes[:200], batch_size=20, shuffle=True), val=TensorLoader(nodes[200:], batch_size=50)
    )
