import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Task(forge.TaskModule):
    """Two towers that find the picture which belongs to a text."""

    def __init__(self, width: int = 24, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.words = nn.EmbeddingBag(80, width)
        self.text_out = nn.Linear(width, width)
        self.image = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten())
        self.image_out = nn.Linear(12 * 16, width)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, words, image):
        text = F.normalize(self.text_out(self.words(words)), dim=1)
        image = F.normalize(self.image_out(self.image(image)), dim=1)
        return self.log_scale.exp() * text @ image.T

    def training_step(self, batch):
        words, image = batch
        logits = self(words, image)
        labels = torch.zeros(len(words), dtype=torch.long, device=words.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        hits = logits.argmax(1) == torch.arange(len(words), device=words.device)
        return {"loss": loss, "retrieved": hits.float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(9)
    words = torch.randint(80, (1200, 6), generator=g)
    patterns = torch.randn(80, 8, 8, generator=g)
    image = patterns[words].mean(1) * 2.4 + 0.3 * torch.randn(1200, 8, 8, generator=g)
    image = image.unsqueeze(1)
    dataset = TensorDataset(words, image)
    train, val = random_split(dataset, [960, len(dataset) - 960], generator=torch.Generator().manual_seed(35))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
