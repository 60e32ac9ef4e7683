import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Fill in masked tokens with a small transformer."""

    def __init__(self, vocabulary: int = 40, width: int = 48, length: int = 16, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.mask_id = vocabulary
        self.embed = nn.Embedding(vocabulary + 1, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary + 1)

    def forward(self, tokens):
        return self.out(self.norm(self.encoder(self.embed(tokens) + self.position)))

    def training_step(self, batch):
        (tokens,) = batch
        labels = tokens
        hidden = torch.rand(tokens.shape, device=tokens.device) < 0.2
        hidden[:, 0] = True
        tokens[hidden] = self.mask_id
        logits = self(tokens)[hidden]
        loss = F.cross_entropy(logits, labels[hidden])
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels[hidden]).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(27)
    start = torch.randint(40, (1000, 1), generator=g)
    stride = torch.randint(1, 5, (1000, 1), generator=g)
    tokens = (start + stride * torch.arange(16)) % 40
    noise = torch.rand(tokens.shape, generator=g) < 0.05
    tokens = torch.where(noise, torch.randint(40, tokens.shape, generator=g), tokens)
    dataset = TensorDataset(tokens)
    train, val = Subset(dataset, range(800)), Subset(dataset, range(800, len(tokens)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
