import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Themes of letters, as words with padding."""

    def __init__(self, words: int = 60, width: int = 32, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.place = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(width, 4)

    def forward(self, text):
        is_word = text != 0
        h = self.encoder(self.embedding(text) + self.place, src_key_padding_mask=is_word)
        weight = is_word.unsqueeze(2).to(h.dtype)
        return self.out((h * weight).sum(1) / weight.sum(1))

    def training_step(self, batch):
        text, theme = batch
        logits = self(text)
        return {"loss": F.cross_entropy(logits, theme), "accuracy": (logits.argmax(1) == theme).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(55)
    theme = torch.randint(4, (1000,), generator=g)
    likely = torch.softmax(1.5 * torch.randn(4, 59, generator=g), dim=-1)
    text = 1 + torch.multinomial(likely[theme], 16, replacement=True, generator=g)
    length = torch.randint(6, 16, (1000, 1), generator=g)
    text = text.masked_fill(torch.arange(16) >= length, 0)
    return Splits(
        train=TensorLoader(text[:800], theme[:800], batch_size=32, shuffle=True),
        val=TensorLoader(text[800:], theme[800:], batch_size=50),
    )
