"""Cases of the overhead benchmark: network, batches and optimizer, the same for every contender."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

Batch = tuple[Tensor, Tensor]

WARM_UP = 60
"""Updates before the clock starts: allocator, optimizer state, and the first log (at 50), which opens the log files."""
TAIL = 2
"""Updates after the clock stops, so that a loader can prefetch until then."""
POOL = 16
"""Number of different batches in memory, used in turn."""


@dataclass(frozen=True, slots=True)
class Case:
    """One training setup. `accumulate` micro-batches make one update; clip and schedule are optional.

    `share` of the requested updates are timed, so that cases with long and short updates take equally long.
    """

    name: str
    note: str
    network: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    accumulate: int = 1
    clip: float | None = None
    scheduled: bool = False
    share: float = 1.0

    def build(self) -> nn.Module:
        """Return a new network with the same weights every time."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.network()

    def timed(self, updates: int) -> int:
        return max(5, round(updates * self.share))

    def pool(self) -> list[Batch]:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return [self.batch() for _ in range(POOL)]

    def optimizer(self, network: nn.Module) -> Optimizer:
        return torch.optim.Adam(network.parameters(), lr=1e-3)

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, decay if self.scheduled else constant)


class Batches:
    """The loader of all contenders: batches in memory, and a stamp of CPU time at the first batch of every update.

    The clock runs from the first batch of update `WARM_UP` to that of update `WARM_UP + timed`, so that building a
    trainer and its first and last updates are not counted, and no contender runs a hook for it. A loop that prefetches
    a constant number of batches does so at every stamp alike.
    """

    def __init__(self, pool: list[Batch], case: Case, timed: int):
        self.pool, self.micro, self.timed = pool, case.accumulate, timed
        self.updates = WARM_UP + timed + TAIL
        self.stamped = range(WARM_UP, WARM_UP + timed + 1)
        self.stamps: list[float] = []

    def __len__(self) -> int:
        return self.updates * self.micro

    def __iter__(self) -> Iterator[Batch]:
        turn = itertools.cycle(self.pool)
        for since, update in itertools.pairwise([0, *self.stamped]):
            yield from itertools.islice(turn, (update - since) * self.micro)
            self.stamps.append(time.process_time())
        yield from itertools.islice(turn, TAIL * self.micro)

    def __getitem__(self, index: int) -> Batch:
        """Return a batch by index, in order, for a DataLoader."""
        if index % self.micro == 0 and index // self.micro in self.stamped:
            self.stamps.append(time.process_time())
        return self.pool[index % POOL]

    def microseconds(self) -> float:
        """Return the CPU time of one update, over all threads of the process."""
        return (self.stamps[-1] - self.stamps[0]) / self.timed * 1e6

    def each(self) -> list[float]:
        """Return the CPU time of each update."""
        return [(after - before) * 1e6 for before, after in itertools.pairwise(self.stamps)]


def as_dataloader(batches: Batches) -> DataLoader:
    """Return a torch DataLoader at its least cost, without workers and collating, for peers that require one."""
    return DataLoader(cast(Dataset, batches), batch_size=None)


def loss_of(network: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(network(x), y)


def constant(update: int) -> float:
    return 1.0


def decay(update: int) -> float:
    return 1.0 / (1.0 + update / 100)


class Transformer(nn.Module):
    """Two causal pre-norm blocks of width 64, no dropout: contenders draw different numbers from the global RNG."""

    def __init__(self, vocabulary: int = 64, width: int = 64, context: int = 32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(x) + self.position, mask=self.mask, is_causal=True)
        return self.head(hidden).flatten(0, 1)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def _images() -> Batch:
    return torch.randn(32, 784), torch.randint(10, (32,))


def _tokens() -> Batch:
    return torch.randint(64, (6, 32)), torch.randint(64, (6 * 32,))


CASES = {
    case.name: case
    for case in (
        Case("mlp", "MLP 784-64-10, batch 32, Adam", _mlp, _images),
        Case("transformer", "2 blocks of width 64, 6 × 32 tokens, Adam", Transformer, _tokens, share=0.25),
        Case("stack", "the MLP, accumulation 4 + clip 1.0 + schedule", _mlp, _images, 4, 1.0, True, 0.5),
    )
}
