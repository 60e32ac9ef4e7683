"""Classify the papers of a citation graph with a two-layer GCN; the loaders give the nodes of each split."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

import forge

NODES, CLASSES, WORDS = 300, 4, 24


def graph():
    g = torch.Generator().manual_seed(71)
    topic = torch.randint(CLASSES, (NODES,), generator=g)
    same = topic[:, None] == topic[None]
    edges = torch.rand(NODES, NODES, generator=g) < torch.where(same, 0.02, 0.008)
    edges = (edges | edges.T).float()
    edges.fill_diagonal_(1.0)
    degree = edges.sum(1).rsqrt()
    words = 0.5 * torch.randn(CLASSES, WORDS, generator=g)[topic] + torch.randn(NODES, WORDS, generator=g)
    return words, degree[:, None] * edges * degree[None], topic


class Task(forge.TaskModule):
    def __init__(self, hidden=32):
        super().__init__()
        words, adjacency, topic = graph()
        self.register_buffer("words", words)
        self.register_buffer("adjacency", adjacency)
        self.register_buffer("topic", topic)
        self.w1 = nn.Linear(WORDS, hidden)
        self.w2 = nn.Linear(hidden, CLASSES)
        self.drop = nn.Dropout(0.2)

    def forward(self):
        h = F.relu(self.adjacency @ self.w1(self.words))
        return self.adjacency @ self.w2(self.drop(h))

    def training_step(self, nodes):
        logits = self()
        return {
            "loss": F.cross_entropy(logits, self.topic),
            "accuracy": (logits.argmax(1) == self.topic)[nodes].float().mean(),
        }

    def validation_step(self, nodes):
        logits = self()
        return {
            "loss": F.cross_entropy(logits[nodes], self.topic[nodes]),
            "accuracy": (logits.argmax(1) == self.topic)[nodes].float().mean(),
        }

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, weight_decay=5e-4)


def data():
    nodes = torch.randperm(NODES, generator=torch.Generator().manual_seed(72)).tolist()
    return SimpleNamespace(
        train=DataLoader(nodes[:200], batch_size=20, shuffle=True), val=DataLoader(nodes[200:], batch_size=50)
    )
