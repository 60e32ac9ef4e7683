"""What the healthy models share: synthetic data, loaders, and tasks around a model of someone else."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import forge
from forge.data import Splits

Entry = Callable[[], tuple[forge.TaskModule, Splits]]


def registry() -> tuple[dict[str, Entry], Callable[[Entry], Entry]]:
    """The models of a file by name, and a decorator that adds one."""
    models: dict[str, Entry] = {}
    return models, lambda function: models.setdefault(function.__name__, function)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensor_loaders(*tensors: Tensor, val: int = 48, batch_size: int = 16, shuffle: bool = True) -> Splits:
    """The last `val` samples are for validation, the others for training."""
    train = TensorDataset(*(tensor[:-val] for tensor in tensors))
    held_out = TensorDataset(*(tensor[-val:] for tensor in tensors))
    return Splits(
        train=DataLoader(train, batch_size=batch_size, shuffle=shuffle), val=DataLoader(held_out, batch_size=batch_size)
    )


class Samples(Dataset):
    """A list of samples of any kind."""

    def __init__(self, samples: list[Any]):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def sample_loaders(
    samples: list[Any], val: int = 48, batch_size: int = 16, collate_fn: Callable | None = None
) -> Splits:
    return Splits(
        train=DataLoader(Samples(samples[:-val]), batch_size=batch_size, shuffle=True, collate_fn=collate_fn),
        val=DataLoader(Samples(samples[-val:]), batch_size=batch_size, collate_fn=collate_fn),
    )


def dict_loaders(columns: dict[str, Tensor], val: int = 48, batch_size: int = 16) -> Splits:
    """Batches are dicts of tensors."""
    count = len(next(iter(columns.values())))
    return sample_loaders(
        [{name: column[i] for name, column in columns.items()} for i in range(count)], val=val, batch_size=batch_size
    )


def gratings(
    count: int = 240, size: int = 32, classes: int = 4, channels: int = 3, noise: float = 0.5, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Noisy stripes: the class is their direction, and a tint goes with it. Zero mean, unit variance."""
    g = generator(seed)
    labels = torch.randint(classes, (count,), generator=g)
    ys, xs = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    angle = (math.pi * labels / classes)[:, None, None]
    phase = torch.rand(count, 1, 1, generator=g) * 2 * math.pi
    waves = torch.sin((xs * angle.cos() + ys * angle.sin()) * 2 * math.pi / 8 + phase)
    tints = 0.5 * torch.randn(classes, channels, generator=g)
    images = waves[:, None] + tints[labels][:, :, None, None]
    images = images + noise * torch.randn(count, channels, size, size, generator=g)
    return (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True), labels


def rectangles(count: int = 160, size: int = 48, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One bright rectangle or one dark disc per image: images, masks (0, 1 or 2 per pixel), boxes and classes."""
    g = generator(seed)
    ys, xs = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    images = 0.3 * torch.randn(count, 3, size, size, generator=g)
    masks = torch.zeros(count, size, size, dtype=torch.long)
    boxes, kinds = torch.zeros(count, 4), torch.randint(1, 3, (count,), generator=g)
    for i in range(count):
        width, height = (int(v) for v in torch.randint(size // 4, size // 2, (2,), generator=g))
        if kinds[i] == 2:
            height = width
        left = int(torch.randint(0, size - width, (1,), generator=g))
        top = int(torch.randint(0, size - height, (1,), generator=g))
        if kinds[i] == 1:
            inside = (xs >= left) & (xs < left + width) & (ys >= top) & (ys < top + height)
        else:
            radius = width / 2
            inside = (xs - left - radius) ** 2 + (ys - top - radius) ** 2 <= radius**2
        masks[i][inside] = kinds[i]
        images[i, :, inside] += 2.0 if kinds[i] == 1 else -2.0
        boxes[i] = torch.tensor([left, top, left + width, top + height])
    return (images - images.mean()) / images.std(), masks, boxes, kinds


def walks(count: int = 240, length: int = 16, vocabulary: int = 24, first: int = 4, seed: int = 0) -> Tensor:
    """Token sequences of a sparse Markov chain; the tokens below `first` are kept for special purposes."""
    g = generator(seed)
    states = vocabulary - first
    successors = torch.stack([torch.randperm(states, generator=g)[:3] for _ in range(states)])
    chances = torch.tensor([0.7, 0.2, 0.1])
    tokens = torch.zeros(count, length, dtype=torch.long)
    tokens[:, 0] = torch.randint(states, (count,), generator=g)
    for t in range(1, length):
        choice = torch.multinomial(chances, count, replacement=True, generator=g)
        tokens[:, t] = successors[tokens[:, t - 1], choice]
    return tokens + first


def topics(
    count: int = 240, length: int = 16, vocabulary: int = 32, classes: int = 3, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Padded texts of two kinds of words: those of a class and common ones. Tokens, attention mask, labels.

    Token 0 pads, 1 begins and 2 ends a text, 3 is free for a mask.
    """
    g = generator(seed)
    labels = torch.randint(classes, (count,), generator=g)
    lengths = torch.randint(length // 2, length + 1, (count,), generator=g)
    words = (vocabulary - 4) // (classes + 1)
    common = 4 + torch.randint(words, (count, length), generator=g)
    own = 4 + words * (labels[:, None] + 1) + torch.randint(words, (count, length), generator=g)
    tokens = torch.where(torch.rand(count, length, generator=g) < 0.4, own, common)
    tokens[:, 0] = 1
    tokens[torch.arange(count), lengths - 1] = 2
    mask = (torch.arange(length) < lengths[:, None]).long()
    return tokens * mask, mask, labels


def accuracy(logits: Tensor, labels: Tensor, ignore: int = -100) -> Tensor:
    counted = labels != ignore
    return ((logits.argmax(-1) == labels) & counted).sum() / counted.sum().clamp(min=1)


def adamw(parameters: Iterable[Any], lr: float = 1e-3, decay: float = 0.01) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay)


class Classify(forge.TaskModule):
    """Cross-entropy on the logits of any network, with AdamW."""

    def __init__(self, net: nn.Module, lr: float = 1e-3):
        super().__init__()
        self.net, self.lr = net, lr

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch):
        inputs, labels = batch
        logits = self(inputs)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


class OwnLoss(forge.TaskModule):
    """A model that computes its own loss from a batch of named inputs, as those of transformers do."""

    def __init__(self, model: nn.Module, lr: float = 1e-3):
        super().__init__()
        self.model = model
        self.lr = lr

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch)

    def training_step(self, batch):
        return {"loss": self(batch).loss}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


class Labelled(OwnLoss):
    """The same, with its accuracy."""

    def training_step(self, batch):
        out = self(batch)
        return {"loss": out.loss, "accuracy": accuracy(out.logits, batch["labels"])}

    validation_step = training_step


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), activation())]
    return nn.Sequential(*layers[:-1])
