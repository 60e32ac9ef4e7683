import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocabulary, width)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, tokens):
        h = F.relu(self.hidden(self.bag(tokens)))
        return torch.sigmoid(self.out(h)).squeeze(1)


class Task(forge.TaskModule):
    def __init__(self, width: int = 32, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.model = Classifier(200, width)

    def forward(self, tokens):
        return self.model(tokens)

    def training_step(self, batch):
        tokens, spam = batch
        output = self(tokens)
        loss = F.binary_cross_entropy(torch.sigmoid(output), spam)
        return {"loss": loss, "accuracy": ((output > 0.5) == spam.bool()).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(81)
    tokens = torch.randint(200, (1400, 24), generator=g)
    weight = torch.randn(200, generator=g)
    score = weight[tokens].sum(1) / 4.9 + 0.4 * torch.randn(1400, generator=g)
    spam = (score > 0.2).float()
    train = TensorDataset(tokens[:1120], spam[:1120])
    val = TensorDataset(tokens[1120:], spam[1120:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
