"""Gradients on their way to the weights: hooks, repeated modules, groups of weight decay."""

from __future__ import annotations

import torch
from torch import nn

from forge_doctor.probes import gradients
from tests.support.patients import Healthy, found


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


class Deep(Healthy):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers, nn.Linear(8, 4))


def test_one_module_several_times() -> None:
    act = nn.ReLU()
    assert "repeated_module" in found(Deep([nn.Linear(8, 8)] * 3), gradients.repeated)
    assert found(Deep([nn.Linear(8, 8), act, nn.Linear(8, 8), act]), gradients.repeated) == {}
