import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Next syllable of a line with a small causal transformer."""

    def __init__(self, syllables: int = 30, width: int = 32, length: int = 16, lr: float = 1e-3, warmup: int = 20_000):
        super().__init__()
        self.lr = lr
        self.warmup = warmup
        self.embed = nn.Embedding(syllables, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(width, syllables)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, line):
        h = self.embed(line) + self.position[: line.shape[1]]
        size = line.shape[1]
        return self.out(self.blocks(h, mask=self.mask[:size, :size], is_causal=True))

    def training_step(self, batch):
        (line,) = batch
        logits = self(line[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), line[:, 1:].flatten())

    validation_step = training_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return optimizer, LinearLR(optimizer, start_factor=1e-3, total_iters=self.warmup)


def data() -> Splits:
    g = torch.Generator().manual_seed(81)
    likely = torch.softmax(2 * torch.randn(30, 30, generator=g), 1)
    line = torch.randint(30, (900, 17), generator=g)
    for t in range(1, 17):
        line[:, t] = torch.multinomial(likely[line[:, t - 1]], 1, generator=g).squeeze(1)
    train = TensorDataset(line[:720])
    val = TensorDataset(line[720:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
