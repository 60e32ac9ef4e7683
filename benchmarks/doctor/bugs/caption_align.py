import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Map a token sequence onto the vector of the picture that it describes."""

    def __init__(self, vocabulary: int = 50, width: int = 40, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, 12)

    def forward(self, tokens):
        _, h = self.rnn(self.embed(tokens))
        return self.out(h[-1])

    def training_step(self, batch):
        tokens, picture = batch
        similarity = F.cosine_similarity(self(tokens), picture, dim=1)
        return {"loss": similarity.mean(), "close": (similarity > 0.7).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(62)
    tokens = torch.randint(50, (1000, 10), generator=g)
    meaning = torch.randn(50, 12, generator=g)
    picture = meaning[tokens].mean(1) * 3 + 0.3 * torch.randn(1000, 12, generator=g)
    dataset = TensorDataset(tokens, picture)
    train, val = Subset(dataset, range(800)), Subset(dataset, range(800, len(tokens)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
