"""Probes of names, shared memory and labels: each with its bug, and with a healthy neighbour."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge_doctor.probes import aliases, data, graph, losses
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


class Counts(Healthy):
    log_input = True

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        rate = F.softplus(self.net(x)[:, 0])
        return F.poisson_nll_loss(rate, y.float(), log_input=self.log_input)


class CountsRightly(Counts):
    log_input = False


class Spells(Healthy):
    blank = 0

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        scores = self.net(x).log_softmax(-1)[None].expand(6, -1, -1)
        lengths = torch.full((len(x),), 6)
        return F.ctc_loss(scores, y[:, None] % 3, lengths, torch.ones(len(x), dtype=torch.long), blank=self.blank)


class SpellsRightly(Spells):
    blank = 3


class Fills(forge.TaskModule):
    """Fills in hidden tokens; `counted` says which positions count."""

    hidden_count = True

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))

    def training_step(self, batch: Any) -> Any:
        (ids,) = batch
        hidden = torch.rand(ids.shape) < 0.3
        labels = ids.masked_fill(hidden != self.hidden_count, -100)
        return F.cross_entropy(self.net(ids.masked_fill(hidden, 0)).flatten(0, 1), labels.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class FillsNothing(Fills):
    hidden_count = False

    def training_step(self, batch: Any) -> Any:
        (ids,) = batch
        labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
        return F.cross_entropy(self.net(ids).flatten(0, 1), labels.flatten())


class FillsFromTheBatch(Fills):
    def training_step(self, batch: Any) -> Any:
        shown, labels = batch
        return F.cross_entropy(self.net(shown).flatten(0, 1), labels.flatten())


class OwnLoss(nn.Module):
    """Computes its own loss from labels that it is given, as models of transformers do."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, shown: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(shown).flatten(0, 1), labels.clone().flatten())


class FillsByItself(Fills):
    def __init__(self) -> None:
        super().__init__()
        self.net = OwnLoss(self.net)

    def training_step(self, batch: Any) -> Any:
        return self.net(*batch)


def tokens() -> Tensor:
    return torch.randint(1, 12, (64, 10), generator=torch.Generator().manual_seed(0))


def test_labels_that_are_the_inputs() -> None:
    ids = tokens()
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    shown = ids.masked_fill(hidden, 0)
    right, wrong = ids.masked_fill(~hidden, -100), ids.masked_fill(hidden, -100)
    assert "label_in_features" in found(FillsFromTheBatch(), losses.copied_labels, data=(loader(shown, wrong), None))
    assert found(FillsFromTheBatch(), losses.copied_labels, data=(loader(shown, right), None)) == {}
    assert "label_in_features" in found(FillsNothing(), losses.copied_labels, data=(loader(ids), None))
    assert found(FillsByItself(), losses.copied_labels, data=(loader(shown, right), None)) == {}
    assert "label_in_features" in found(FillsByItself(), losses.copied_labels, data=(loader(shown, wrong), None))


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
        ("activation_before_loss", Counts, losses.inputs, CountsRightly),
        ("label_values", Spells, losses.inputs, SpellsRightly),
    ],
)
def test_a_mistake_is_found_and_what_is_right_is_left_in_peace(
    finding: str, sick: Any, probe: Any, healthy: Any
) -> None:
    assert finding in found(sick(), probe)
    assert found(healthy(), probe) == {}
