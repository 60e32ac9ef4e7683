"""What the tests of swa share."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from forge.testing import tiny_batches


class Noisy(Dataset[Any]):
    """Draws as it is read, so that whoever reads out of turn is found out."""

    def __init__(self) -> None:
        self.x, self.y = (torch.cat(parts) for parts in zip(*tiny_batches(), strict=True))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * np.random.rand()
        return self.x[index] + noise.float(), self.y[index]
