import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class BagOfWords(nn.Module):
    def __init__(self, vocabulary: int, classes: int, width: int = 48):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocabulary, width, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, tokens):
        return self.mlp(self.bag(tokens))


class Task(forge.TaskModule):
    """Rate short reviews."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.model = BagOfWords(vocabulary=300, classes=5)

    def forward(self, tokens):
        return self.model(tokens)

    def training_step(self, batch):
        tokens, rating = batch
        logits = self(tokens)
        return {"loss": F.cross_entropy(logits, rating), "accuracy": (logits.argmax(1) == rating).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 40) -> Splits:
    g = torch.Generator().manual_seed(14)
    polarity = torch.randn(300, generator=g)
    tokens = torch.randint(300, (1500, 18), generator=g)
    score = polarity[tokens].mean(1) + 0.05 * torch.randn(1500, generator=g)
    rating = torch.bucketize(score, torch.quantile(score, torch.tensor([0.25, 0.5, 0.75]))) + 1
    return Splits(
        train=TensorLoader(tokens[:1200], rating[:1200], batch_size=batch_size, shuffle=True),
        val=TensorLoader(tokens[1200:], rating[1200:], batch_size=100),
    )
