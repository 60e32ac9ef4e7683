import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Encoder(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int = 32, layers: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens):
        index = torch.arange(tokens.shape[1], device=tokens.device)
        h = self.tokens(tokens)
        h = self.positions(index).expand_as(h)
        return self.layers(h).mean(dim=1)


class Task(forge.TaskModule):
    """Tell five families of sequences apart."""

    def __init__(self, families: int = 5, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.encoder = Encoder(vocabulary=12, length=20)
        self.head = nn.Linear(32, families)

    def forward(self, tokens):
        return self.head(self.encoder(tokens))

    def training_step(self, batch):
        tokens, family = batch
        logits = self(tokens)
        return {"loss": F.cross_entropy(logits, family), "accuracy": (logits.argmax(1) == family).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(26)
    family = torch.randint(5, (1000,), generator=g)
    chains = torch.softmax(1.5 * torch.randn(5, 12, 12, generator=g), dim=-1)
    tokens = [torch.randint(12, (1000,), generator=g)]
    for _ in range(19):
        tokens.append(torch.multinomial(chains[family, tokens[-1]], 1, generator=g).squeeze(1))
    tokens = torch.stack(tokens, dim=1)
    return Splits(
        train=TensorLoader(tokens[:800], family[:800], batch_size=batch_size, shuffle=True),
        val=TensorLoader(tokens[800:], family[800:], batch_size=50),
    )
