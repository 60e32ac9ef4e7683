import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

SPECIAL = 4


class Task(forge.TaskModule):
    """Topic of a sentence; the embeddings of the special tokens stay fixed."""

    def __init__(self, vocabulary: int = 150, width: int = 24, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(vocabulary, width)
        keep = torch.zeros(vocabulary, 1)
        keep[:SPECIAL] = 1.0
        self.register_buffer("keep", keep)
        self.embed.weight.register_hook(lambda grad: grad * self.keep.to(grad.device))
        self.net = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, tokens):
        return self.net(self.embed(tokens).mean(1))

    def training_step(self, batch):
        tokens, topic = batch
        logits = self(tokens)
        return {"loss": F.cross_entropy(logits, topic), "accuracy": (logits.argmax(1) == topic).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(8)
    topic = torch.randint(5, (1500,), generator=g)
    likely = torch.softmax(1.2 * torch.randn(5, 146, generator=g), 1)
    tokens = SPECIAL + torch.multinomial(likely[topic], 12, replacement=True, generator=g)
    tokens[:, 0] = 1
    tokens[:, -1] = 2
    dataset = TensorDataset(tokens, topic)
    train, val = Subset(dataset, range(1200)), Subset(dataset, range(1200, len(tokens)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
