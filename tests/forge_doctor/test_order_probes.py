"""Order in a row: forecasts that see the future, positions that are not read, attention without positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_doctor.probes import order
from tests.support.patients import Healthy, found, loader

IDS = torch.randint(3, 20, (48, 8), generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(48) % 4


class Forecast(Healthy):
    """The next number of a series."""

    left = 2

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv1d(1, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.pad(x[:, None], (self.left, 2 - self.left))).squeeze(1)

    def training_step(self, batch: Any) -> Any:
        (x,) = batch
        return F.mse_loss(self(x[:, :-1]), x[:, 1:])


class Peeks(Forecast):
    left = 1


def test_a_forecast_that_sees_the_next_number() -> None:
    data = loader(torch.randn(48, 12)), None
    assert "sees_the_future" in found(Peeks(), order.forecast, data=data)
    assert found(Forecast(), order.forecast, data=data) == {}


class Attention(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong, self.mix = wrong, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        n, steps, _ = x.shape
        h = self.mix(x)
        h = h.view(n, 4, steps, 4) if self.wrong else h.view(n, steps, 4, 4).transpose(1, 2)
        h = F.scaled_dot_product_attention(h, h, h, is_causal=True)
        return x + (h.reshape(x.shape) if self.wrong else h.transpose(1, 2).reshape(x.shape))


class Language(Healthy):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(20, 16), Attention(wrong), nn.Linear(16, 20))

    def training_step(self, batch: Any) -> Any:
        (ids,) = batch
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def test_heads_that_are_split_by_view() -> None:
    data = loader(torch.cat([IDS, IDS[:, :1]], 1)), None
    assert "positions 2, 4, 6" in found(Language(True), order.previous, data=data)["positions_ignored"].message
    assert found(Language(False), order.previous, data=data) == {}


class Intent(Healthy):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self.embed, self.gru, self.out = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(self.embed(x))[0][:, self.step])


def test_a_result_of_the_first_step_alone() -> None:
    data = loader(IDS, LABELS), None
    assert "position 0 of 8" in found(Intent(0), order.positions, data=data)["positions_ignored"].message
    assert found(Intent(-1), order.positions, data=data) == {}


class Log(Healthy):
    """Attention over tokens, with or without positions."""

    def __init__(self, positions: bool) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(20, 8), nn.Parameter(torch.randn(8, 8) * positions)
        self.attend, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.position
        return self.out(self.attend(h, h, h)[0].mean(1))


class Bag(Healthy):
    """A bag of words has no order rightly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.embed(x).mean(1))


def test_attention_without_positions() -> None:
    ids = torch.randint(3, 12, (400, 8), generator=torch.Generator().manual_seed(2))
    places = torch.linspace(-1, 1, 8)
    by_order = (((ids == 5) * places).sum(1) > ((ids == 6) * places).sum(1)).long()
    by_counts = ((ids == 5).sum(1) > (ids == 6).sum(1)).long()
    assert found(Log(False), order.permuted, data=(loader(ids, by_order), None))["order_ignored"].level == "warning"
    assert found(Log(False), order.permuted, data=(loader(ids, by_counts), None))["order_ignored"].level == "note"
    data = loader(IDS, LABELS), None
    assert found(Log(True), order.permuted, data=data) == found(Bag(), order.permuted, data=data) == {}
