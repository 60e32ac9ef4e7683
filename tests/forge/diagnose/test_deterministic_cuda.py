"""On a GPU: deterministic runs repeat themselves bit for bit, an operation that cannot is named."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.errors import DeterminismError
from forge.testing import Record, assert_same, first_difference
from forge_doctor.witness import Witness

pytestmark = pytest.mark.gpu

Batch = tuple[torch.Tensor, torch.Tensor]


def images(count: int = 6, size: int = 32, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 3, 32, 32, generator=generator), torch.randint(10, (size,), generator=generator))
        for _ in range(count)
    ]


class CNN(forge.TaskModule):
    """Convolutions, normalisation, pooling, dropout, an embedding and an index: what differs from run to run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(64 * 8 * 8, 10),
        )
        self.table = nn.Embedding(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.net(x)
        return logits + self.table(logits.argmax(1))

    def training_step(self, batch: Batch) -> Any:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(task: forge.TaskModule, data: Any = None, plugins: Any = (), **options: Any) -> forge.TaskModule:
    settings = {"max_updates": 6, "seed": 0, "device": "cuda", "run_dir": False, "deterministic": True, **options}
    torch.manual_seed(0)
    forge.Trainer(plugins=list(plugins), **settings).fit(task, images() if data is None else data)
    return task


def made(kind: Any = CNN) -> Any:
    torch.manual_seed(0)
    return kind()


def refusal(task: forge.TaskModule) -> str:
    with pytest.raises(DeterminismError) as caught:
        train(task)
    return str(caught.value)


def line_of(code: Any, text: str) -> str:
    lines, first = inspect.getsourcelines(code)
    return f"{Path(__file__)}:{first + next(i for i, line in enumerate(lines) if text in line)}"


# -- deterministic=True -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugins", [[], ["guard", "clip", "amp", "accumulate"]])
def test_a_convolutional_network_trains_twice_to_the_same_bits(plugins: list[str]) -> None:
    assert_same(train(made(), plugins=plugins), train(made(), plugins=plugins))


class Enlarges(CNN):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        larger = F.interpolate(x * self.table.weight[0, 0], scale_factor=2, mode="bicubic")
        return self.net(F.avg_pool2d(larger, 2))


class Takes(CNN):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle, _ = x.flatten(1).median(1)
        return self.net(x) + middle[:, None]


class Counts(CNN):
    def training_step(self, batch: Batch) -> Any:
        loss = super().training_step(batch)
        return {"loss": loss, "spread": torch.histc(batch[0], 4).std()}


def test_a_backward_is_named_with_the_line_of_its_forward() -> None:
    told = refusal(made(Enlarges))
    assert "upsample_bicubic2d_backward" in told
    assert f"It is in the backward of what was called at {line_of(Enlarges.forward, 'bicubic')}." in told
    assert "mode='nearest'" in told


@pytest.mark.parametrize(("task", "name", "line", "advice"), [
    (Takes, "median", ".median(1)", "torch.quantile"),
    (Counts, "histc", "torch.histc", "torch.bincount"),
])  # fmt: skip
def test_a_forward_without_one_is_named_with_its_line(task: Any, name: str, line: str, advice: str) -> None:
    told = refusal(made(task))
    code = task.forward if task is Takes else task.training_step
    assert name in told
    assert f"It was called at {line_of(code, line)}." in told
    assert advice in told


# -- the first tensor that differs ------------------------------------------------------------------------------------


class Sums(nn.Module):
    """Adds a million numbers up in whatever order the threads come."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("values", torch.randn(1_000_000, generator=generator))
        self.register_buffer("places", torch.randint(10, (1_000_000,), generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(10, device=x.device).index_add_(0, self.places, self.values)  # pyright: ignore[reportArgumentType]
        return x + 1e-3 * total


class Atomic(CNN):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(Sums())


def record(deterministic: bool) -> Record:
    kept = Record()
    train(made(Atomic), plugins=[Witness(kept, 3)], deterministic=deterministic)
    return kept


def test_a_sum_in_no_fixed_order_is_found_and_mended() -> None:
    assert first_difference(record(True), record(True)) is None
    first, found = record(False), None
    for _ in range(10):
        found = first_difference(first, record(False))
        if found is not None and found.path == "net.9 (Sums)":
            break
    assert found is not None
    assert found.distance.relative < 1e-3
