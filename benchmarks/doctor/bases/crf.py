import torch
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Task(forge.TaskModule):
    """A linear-chain CRF over words: the loss is the negative log-likelihood of the whole tag sequence."""

    def __init__(self, words: int = 20, tags: int = 4, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(words, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.emit = nn.Linear(16, tags)
        self.first, self.moves = nn.Parameter(torch.zeros(tags)), nn.Parameter(torch.zeros(tags, tags))

    def forward(self, words):
        return self.emit(torch.relu(self.conv(self.embed(words).transpose(1, 2))).transpose(1, 2))

    def loss(self, scores, tags):
        path = self.first[tags[:, 0]] + scores.gather(2, tags[..., None]).squeeze(-1).sum(1)
        path = path + self.moves[tags[:, :-1], tags[:, 1:]].sum(1)
        total = self.first + scores[:, 0]
        for t in range(1, scores.shape[1]):
            total = torch.logsumexp(total[:, :, None] + self.moves, 1) + scores[:, t]
        return (torch.logsumexp(total, 1) - path).mean()

    def training_step(self, batch):
        words, tags = batch
        return {"loss": self.loss(self(words), tags)}

    def validation_step(self, batch):
        words, tags = batch
        scores = self(words)
        best, back = self.first + scores[:, 0], []
        for t in range(1, scores.shape[1]):
            best, origin = (best[:, :, None] + self.moves).max(1)
            best = best + scores[:, t]
            back.append(origin)
        path = [best.argmax(1)]
        for origin in reversed(back):
            path.append(origin.gather(1, path[-1][:, None]).squeeze(1))
        right = (torch.stack(path[::-1], 1) == tags).float().mean()
        return {"loss": self.loss(scores, tags), "accuracy": right}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(8)
    chain = torch.softmax(1.5 * torch.randn(4, 4, generator=g), 1)
    tags = torch.randint(4, (480, 8), generator=g)
    for t in range(1, 8):
        tags[:, t] = torch.multinomial(chain[tags[:, t - 1]], 1, generator=g).squeeze(1)
    words = 5 * tags + torch.randint(5, tags.shape, generator=g)
    words = torch.where(torch.rand(tags.shape, generator=g) < 0.3, torch.randint(20, tags.shape, generator=g), words)
    return Splits(
        train=TensorLoader(words[:384], tags[:384], batch_size=24, shuffle=True),
        val=TensorLoader(words[384:], tags[384:], batch_size=24),
    )
