"""Gradients on their way to the weights: hooks, clamps, repeated modules, reversals and optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_doctor.probes import gradients
from tests.support.patients import Healthy, found, loader, numbers


class Hooked(Healthy):
    most = 1.0

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-self.most, self.most))


class Strangled(Hooked):
    most = 1e-7


class FrozenByHook(Healthy):
    def __init__(self) -> None:
        super().__init__()
        next(self.net.parameters()).register_hook(torch.zeros_like)


def test_a_hook_that_leaves_next_to_nothing() -> None:
    assert "gradient_hook" in found(Strangled(), gradients.hooks)
    assert found(Hooked(), gradients.hooks) == found(FrozenByHook(), gradients.hooks) == {}


class Words(Healthy):
    """Rows of an embedding that are kept by a hook."""

    def __init__(self, kept: slice) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        mask = torch.zeros(40, 1)
        mask[kept] = 1
        self.embed.weight.register_hook(lambda gradient: gradient * mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.embed(x).mean(1))


def test_a_hook_that_keeps_the_wrong_rows() -> None:
    ids = torch.arange(64 * 6).view(64, 6) % 40
    rows = loader(ids, torch.arange(64) % 4), None
    assert "38 of the 40 rows" in found(Words(slice(0, 2)), gradients.hooks, data=rows)["gradient_hook"].message
    assert found(Words(slice(38, 40)), gradients.hooks, data=rows) == {}  # words that were added
    assert found(Words(slice(2, 40)), gradients.hooks, data=rows) == {}


class Clamped(Healthy):
    lowest = 50.0

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Linear(8, 1)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        scale = F.softplus(self.spread(x)).clamp(min=self.lowest)
        return F.cross_entropy(self(x) / scale, y)


class LooselyClamped(Clamped):
    lowest = 1e-3


def test_a_clamp_that_is_always_at_its_bound() -> None:
    assert "spread.weight" in found(Clamped(), gradients.clamps, after=2)["no_gradient"].message
    assert found(LooselyClamped(), gradients.clamps, after=2) == {}


class Deep(Healthy):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers, nn.Linear(8, 4))


def test_one_module_several_times() -> None:
    act = nn.ReLU()
    assert "repeated_module" in found(Deep([nn.Linear(8, 8)] * 3), gradients.repeated)
    assert found(Deep([nn.Linear(8, 8), act, nn.Linear(8, 8), act]), gradients.repeated) == {}


class Keeps(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls % 8 == 0:
            super().zero_grad(set_to_none)


class Clears(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


class By(Healthy):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


def test_gradients_that_zero_grad_leaves() -> None:
    assert "gradients_left" in found(By(lambda task: Keeps(task.parameters(), lr=0.1)), gradients.left_over)
    assert found(By(lambda task: Clears(task.parameters(), lr=0.1)), gradients.left_over) == {}


def groups(task: Healthy, matrices: float, others: float) -> torch.optim.Optimizer:
    split = [[p for p in task.parameters() if (p.ndim > 1) is wide] for wide in (True, False)]
    decays = (matrices, others)
    return torch.optim.AdamW([{"params": p, "weight_decay": d} for p, d in zip(split, decays, strict=True)])


def test_decay_of_biases_alone() -> None:
    assert "weight_decay" in found(By(lambda task: groups(task, 0.0, 0.1)), gradients.decay)
    assert found(By(lambda task: groups(task, 0.1, 0.0)), gradients.decay) == {}


class Players(Healthy):
    """Two players; the first is to please the second."""

    cut = False

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Linear(4, 1)

    def training_step(self, batch: Any, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        made = self.net(batch[0])
        score = self.judge(made.detach() if name == "judge" or self.cut else made)
        loss = F.binary_cross_entropy_with_logits(score, torch.full_like(score, float(name != "judge")))
        return loss if name == "judge" else loss + 0.01 * made.square().mean()

    def configure_optimizers(self) -> Any:
        return {"judge": torch.optim.Adam(self.judge.parameters()), "maker": torch.optim.Adam(self.net.parameters())}


class CutPlayers(Players):
    cut = True


def test_a_term_that_reaches_others_alone() -> None:
    data = loader(*numbers(64)), None
    assert "'maker'" in found(CutPlayers(), gradients.other_players, data=data)["no_gradient"].message
    assert found(Players(), gradients.other_players, data=data) == {}


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -0.3 * gradient


class Sites(Healthy):
    """Features that tell the class and not the site."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.site = nn.Linear(8, 8), nn.Linear(8, 4)

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encoder(x)
        return h, Reverse.apply(h)  # pyright: ignore[reportReturnType]

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        straight, turned = self.features(x)
        return F.cross_entropy(self.net(straight), y) + F.cross_entropy(self.site(turned), y)


class AllTurned(Sites):
    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _, turned = super().features(x)
        return turned, turned


def test_a_reversal_before_every_loss() -> None:
    data = loader(*numbers(64)), None
    assert "encoder.weight" in found(AllTurned(), gradients.reversals, data=data)["wrong_gradient"].message
    assert found(Sites(), gradients.reversals, data=data) == {}
