"""remat on a CUDA device: memory that is truly saved, the same bits, and no host sync for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.testing import assert_same
from forge_plugins import Accumulate, Remat
from tests.support.tasks import fit

pytestmark = pytest.mark.gpu

BATCH, LENGTH, WIDTH = 16, 128, 256


class Block(nn.Module):
    """A transformer block of plain operations, each of which gives the same bits every time."""

    def __init__(self, width: int = WIDTH, heads: int = 4, dropout: float = 0.1):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.first(x))
        return x + self.dropout(self.narrow(F.gelu(self.widen(self.second(x)))))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = self.dropout((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1))
        return self.merge((weights @ v).transpose(1, 2).flatten(2))


class Transformer(forge.TaskModule):
    """Eight blocks over sequences of vectors."""

    autocast = False

    def __init__(self, blocks: int = 8, dropout: float = 0.1):
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            logits = self(x)
        return {"loss": F.cross_entropy(logits.float(), y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Autocast(Transformer):
    autocast = True


def made(kind: type[Transformer] = Transformer, **options: Any) -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(**options)


def sequences(count: int, size: int = BATCH) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, LENGTH, 8, generator=generator), torch.randint(4, (size,), generator=generator))
        for _ in range(count)
    ]


def peak(plugins: list[forge.Plugin], task: Transformer | None = None) -> int:
    """Bytes allocated at most during the second and third update, above what was there before them."""
    peaks: list[int] = []

    class Peak(forge.Plugin):
        @forge.hookimpl(wrapper=True)
        def forge_train_step(self) -> Any:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            result = yield
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            return result

    fit(task or made(), sequences(3), device="cuda", seed=0, plugins=[*plugins, Peak()])
    return max(peaks[1:])


@pytest.mark.parametrize("kind", [Transformer, Autocast])
def test_the_peak_of_eight_blocks_falls_below_half(kind: type[Transformer]) -> None:
    plain, again = peak([], made(kind)), peak([Remat()], made(kind))
    assert again < 0.5 * plain, f"{again / 1e6:.0f} MB instead of {plain / 1e6:.0f} MB"


@pytest.mark.parametrize("kind", [Transformer, Autocast])
@pytest.mark.parametrize("options", [{}, {"every": 2}])
def test_weights_are_bit_for_bit_those_without_it(kind: type[Transformer], options: dict[str, Any]) -> None:
    plain, again = made(kind, blocks=4), made(kind, blocks=4)
    data = sequences(4, size=4)
    fit(plain, data, data[:1], device="cuda", seed=3, plugins=[Accumulate(2)])
    fit(again, data, data[:1], device="cuda", seed=3, plugins=[Remat(**options), Accumulate(2)])
    assert_same(again, plain)
