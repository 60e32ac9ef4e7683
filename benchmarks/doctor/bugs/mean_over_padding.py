import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD = 0


class ReviewNet(nn.Module):
    def __init__(self, vocabulary: int, width: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.out = nn.Linear(width, 2)

    def forward(self, tokens):
        words = self.mlp(self.embedding(tokens))
        return self.out(words.mean(dim=1))


class Task(forge.TaskModule):
    """Sentiment of reviews of very different lengths."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = ReviewNet(vocabulary=200)

    def forward(self, tokens):
        return self.net(tokens)

    def training_step(self, batch):
        tokens, sentiment = batch
        logits = self(tokens)
        loss = F.cross_entropy(logits, sentiment)
        return {"loss": loss, "accuracy": (logits.argmax(1) == sentiment).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def collate(reviews):
    tokens = pad_sequence([r[0] for r in reviews], batch_first=True, padding_value=PAD)
    return tokens, torch.tensor([r[1] for r in reviews])


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(19)
    polarity = torch.randn(200, generator=g)
    reviews = []
    for _ in range(1200):
        length = int(torch.randint(4, 50, (1,), generator=g))
        tokens = torch.randint(1, 200, (length,), generator=g)
        score = polarity[tokens].sum() / length**0.5 + 0.2 * torch.randn(1, generator=g)
        reviews.append((tokens, int(score > 0)))
    return Splits(
        train=DataLoader(reviews[:960], batch_size=batch_size, shuffle=True, collate_fn=collate),
        val=DataLoader(reviews[960:], batch_size=60, collate_fn=collate),
    )
