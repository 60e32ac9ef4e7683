"""Probes of names, shared memory and labels: each with its bug, and with a healthy neighbour."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_doctor.probes import aliases, data, graph
from tests.support.patients import Healthy, found, loader, numbers, said


class Misspelt(Healthy):
    def __init__(self) -> None:
        super().__init__()
        for p in self.net[0].parameters():
            p.require_grad = False  # pyright: ignore[reportAttributeAccessIssue]


class Tied(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.tie()

    def tie(self) -> None:
        self.net[2].weight = self.net[0].weight


class TiedByData(Tied):
    def tie(self) -> None:
        self.net[2].get_parameter("weight").data = self.net[0].get_parameter("weight").data


class Scales(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - 130) / 100)


def test_inputs_that_the_model_scales_itself() -> None:
    x, y = numbers()
    assert "unscaled_inputs" in found(Healthy(), data.scales, data=(loader(100 * x + 130, y), None))
    assert found(Scales(), data.scales, data=(loader(100 * x + 130, y), None)) == {}


def test_what_drop_last_leaves_out_of_val() -> None:
    x, y = numbers(100)
    short = loader(x, y, batch=60, drop_last=True, shuffle=False)
    assert "dropped_data" in found(Healthy(), data.dropped, data=(loader(x, y), short))


def test_states_of_a_small_world_repeat() -> None:
    rows = torch.randint(0, 4, (400, 3), generator=torch.Generator().manual_seed(0)).float()
    few = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))[torch.arange(400) % 8]
    y = torch.arange(400) % 4

    class Small(Healthy):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))

    assert "duplicates" in found(Small(), data.copies, data=(loader(few, torch.zeros(400).long()), None))
    assert found(Small(), data.copies, data=(loader(rows, y), None)) == {}


class Teaches(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any) -> Any:
        self.teacher.eval()
        return super().training_step(batch)


def test_a_teacher_may_be_set_to_evaluation() -> None:
    assert found(Teaches(), graph.purity) == {}


@pytest.mark.parametrize("copied", [True, False])
def test_an_average_needs_no_optimizer(copied: bool) -> None:
    class Averages(Healthy):
        def __init__(self) -> None:
            super().__init__()
            self.average = copy.deepcopy(self.net) if copied else nn.Linear(8, 8)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.net.parameters())

    assert ("not_in_optimizer" in said(Averages(), max_updates=1)) is not copied


@pytest.mark.parametrize(
    ("finding", "sick", "probe", "healthy"),
    [
        ("attribute_name", Misspelt, aliases.attributes, Healthy),
        ("shared_storage", TiedByData, aliases.shared_storage, Tied),
    ],
)
def test_a_mistake_is_found_and_what_is_right_is_left_in_peace(
    finding: str, sick: Any, probe: Any, healthy: Any
) -> None:
    assert finding in found(sick(), probe)
    assert found(healthy(), probe) == {}


class Layered(Healthy):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers, nn.Linear(8, 4))


def test_one_module_several_times() -> None:
    act = nn.ReLU()
    assert "repeated_module" in found(Layered([nn.Linear(8, 8)] * 3), aliases.repeated)
    assert found(Layered([nn.Linear(8, 8), act, nn.Linear(8, 8), act]), aliases.repeated) == {}
