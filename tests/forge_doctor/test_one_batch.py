"""One batch, trained on again and again: what is learnt, what is not and why, and what is no mistake."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import forge
from forge.config.build import make_plugins
from forge_doctor.deadline import Deadline
from forge_doctor.learning import one_batch
from forge_doctor.report import Curve
from tests.support.patients import Healthy, loader, numbers


def curve(task: forge.TaskModule, train: Any = None, **options: Any) -> Curve:
    torch.manual_seed(0)
    return one_batch(task, train if train is not None else loader(*numbers(), shuffle=False), **options)


class Quick(Healthy):
    """Learns a batch in a few updates."""

    rate, decay = 0.03, 0.0

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.rate, weight_decay=self.decay)


def test_a_batch_that_is_learnt_ends_early_and_leaves_no_trace() -> None:
    task = Quick()
    before, state = {name: x.clone() for name, x in task.state_dict().items()}, torch.get_rng_state()
    found = one_batch(task, loader(*numbers(), shuffle=False))
    assert found.is_learnt
    assert not found.level
    assert len(found.losses) < 200
    assert found.reached < 0.05 < found.start
    assert found.floor == pytest.approx(0, abs=1e-4)
    assert found.chance == pytest.approx(entropy(numbers()[1][:16]) / 16, abs=0.01)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[name]) for name, x in task.state_dict().items())


class Rises(Quick):
    """Has the wrong sign."""

    def training_step(self, batch: Any) -> Any:
        return -F.cross_entropy(self(batch[0]), batch[1])


def test_a_loss_without_an_end_is_not_called_learnt() -> None:
    found = one_batch(Rises(), loader(*numbers(), shuffle=False), updates=30)
    assert not found.is_learnt
    assert "nothing says how far it can" in found.verdict


class ByHand(Quick):
    """A loss that no function of torch's computes, over a dict, inside the model."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        scores = self(x)
        return {"loss": (scores.logsumexp(1) - scores.gather(1, y[:, None]).squeeze(1)).mean()}


class TwoOptimizers(Quick):
    def training_step(self, batch: Any, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().training_step(batch)

    def configure_optimizers(self) -> Any:
        return {"first": torch.optim.Adam(self.net[0].parameters()), "last": torch.optim.Adam(self.net[2].parameters())}


@pytest.mark.slow
def test_it_runs_for_losses_by_hand_and_several_optimizers() -> None:
    by_hand = curve(ByHand())
    assert by_hand.is_learnt
    two = curve(TwoOptimizers())
    assert two.losses[0] > two.reached
    assert not two.level


class Narrow(Quick):
    """Sees of each sample whether its first number is positive, and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x[:, :1] > 0).float().expand(-1, 8))


def entropy(y: Tensor) -> float:
    """The lowest cross-entropy of one answer for all samples, times their number."""
    return -sum(float(n) * math.log(float(n) / len(y)) for n in y.unique(return_counts=True)[1])


def test_a_plateau_far_from_the_floor_is_a_finding_with_its_figures() -> None:
    found = curve(Narrow())
    x, y = (values[:16] for values in numbers())
    side = x[:, 0] > 0
    assert found.reached == pytest.approx((entropy(y[side]) + entropy(y[~side])) / 16, abs=0.02)
    assert found.level == "warning"
    assert not found.is_learnt
    assert "stays there. No one change was found that helps" in found.verdict
    assert f"to {found.reached:.4g} (chance is {found.chance:.4g}, the floor 0)" in found.verdict


class Decays(Quick):
    decay = 30.0


class Stands(Quick):
    rate = 1e-7


class Descends(Healthy):
    rate = 1.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


@pytest.mark.parametrize(
    ("task", "plugins", "cause"),
    [
        (Decays, {}, "no weight decay"),
        (Stands, {}, "times the learning rate"),
        (Descends, {"clip": {"max_norm": 1e-9}}, "no clipping of gradients"),
    ],
)
def test_the_one_change_that_cures_it_is_the_cause(task: type[Healthy], plugins: Any, cause: str) -> None:
    found = curve(task(), plugins=make_plugins(plugins))
    assert found.level == "warning", found.verdict
    assert cause in found.cause, found.verdict
    assert "that is the cause" in found.verdict


class Drops(Quick):
    """Draws a dropout, a mask and noise in each step."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        x = F.dropout(x + 0.5 * torch.randn_like(x), 0.5)
        return F.cross_entropy(self(x), y)


class Rewarded(Quick):
    def training_step(self, batch: Any) -> Any:
        x, y = batch
        choice = torch.distributions.Categorical(logits=self(x))
        taken = choice.sample()
        reward = (taken == y).float() - 0.25
        return -(choice.log_prob(taken) * reward).mean()


@pytest.mark.slow
@pytest.mark.parametrize("task", [Drops, Rewarded])
def test_what_is_no_mistake_is_no_warning(task: type[Healthy]) -> None:
    torch.manual_seed(0)
    random = numbers()[0], torch.randint(4, (160,), generator=torch.Generator().manual_seed(1))
    found = curve(task(), loader(*random, shuffle=False))
    assert found.level != "warning", found.verdict
    assert found.verdict


class AlmostConstant(Quick):
    """One answer is nearly right for all samples, as the first rewards of a game are."""

    def training_step(self, batch: Any) -> Any:
        x, _ = batch
        return F.smooth_l1_loss(self(x)[:, 0], 1 + 0.02 * x[:, 0])


def test_a_batch_that_one_answer_fits_is_learnt_with_it() -> None:
    found = curve(AlmostConstant())
    assert found.chance is not None
    assert found.reached > found.chance
    assert found.is_learnt


def test_time_that_is_over_is_no_finding() -> None:
    found = curve(Stands(), deadline=Deadline(0))
    assert len(found.losses) == 1
    assert found.is_cut_short
    assert not found.level
    assert "There was no time for more." in found.verdict


@pytest.mark.slow
def test_the_report_has_the_curve_and_what_did_not_run_with_its_reason() -> None:
    torch.manual_seed(0)
    report = forge.doctor(Stands(), loader(*numbers()), max_epochs=1)
    data = report.as_data()["one_batch"]
    assert data["losses"][0] == report.one_batch.start
    assert {"chance", "floor", "reached", "verdict", "tried", "cause"} <= set(data)
    (finding,) = [finding for finding in report.findings if finding.name == "cannot_learn_a_batch"]
    assert finding.message == data["verdict"]
    without = forge.doctor(Stands(), loader(*numbers()), max_epochs=1, budget=0)
    assert without.one_batch is None
    assert without.skipped["learning one batch"] == "no updates on it were asked for"
