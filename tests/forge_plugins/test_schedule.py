"""schedule: the learning rate of every update, exactly."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, OneCycleLR, StepLR

import forge
from forge.errors import ForgeError, RecipeError
from forge.testing import TinyGAN
from forge_plugins import Accumulate, Schedule
from tests.support.profiles import covering
from tests.support.tasks import Classifier, fit, make_batches

PEAK = 0.5


def watched(rates: dict[str | None, list[float]]) -> forge.Plugin:
    """Keeps the learning rate that each update of each optimizer was made with."""

    @forge.on("finalize_grads")
    def watch(step: forge.Step) -> None:
        rates.setdefault(step.name, []).append(float(step.optimizer.param_groups[0]["lr"]))

    return watch


def rates_of(plugin: Schedule, updates: int = 10, task: Any = None, plugins: Any = (), **options: Any) -> list[float]:
    """The learning rates of a fit, one per update."""
    rates: dict[str | None, list[float]] = {}
    options = {"max_epochs": 1, "train": make_batches(updates), **options}
    fit(task or Classifier(lr=PEAK), plugins=[*plugins, plugin, watched(rates)], **options)
    return rates[None]


def torch_rates(make: Callable[[Optimizer], LRScheduler], updates: int, peak: float = PEAK) -> list[float]:
    """The learning rates of a hand-written loop."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak, momentum=0.9)
    schedule, rates = make(optimizer), []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


class ReturnsOne(Classifier):
    """A task that brings its own schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=PEAK)
        return optimizer, StepLR(optimizer, step_size=2, gamma=0.5)


class TestShapes:
    @pytest.mark.parametrize(
        ("schedule", "torchs"),
        [
            (Schedule("cosine", min_ratio=0.1), lambda o: CosineAnnealingLR(o, T_max=10, eta_min=0.1 * PEAK)),
            (Schedule("linear", min_ratio=0.2), lambda o: LinearLR(o, 1.0, end_factor=0.2, total_iters=10)),
            (Schedule("step", step_size=3, gamma=0.5), lambda o: StepLR(o, step_size=3, gamma=0.5)),
            (Schedule("one_cycle"), lambda o: OneCycleLR(o, max_lr=PEAK, total_steps=10)),
        ],
        ids=["cosine", "linear", "step", "one cycle"],
    )
    def test_without_a_warm_up_it_is_torchs(self, schedule: Schedule, torchs: Callable[[Any], LRScheduler]) -> None:
        assert rates_of(schedule) == pytest.approx(torch_rates(torchs, 10))

    @pytest.mark.parametrize(("kind", "warmup", "lowest"), covering(["cosine", "linear"], [0, 1, 4, 9, 10], [0.0, 0.1]))
    def test_the_rate_of_every_update_follows_the_formula(self, kind: str, warmup: int, lowest: float) -> None:
        total, peak = 10, max(warmup - 1, 0)

        def factor(i: int) -> float:
            if i < warmup:
                return (i + 1) / warmup
            share = (i - peak) / (total - peak)
            left = (1 + math.cos(math.pi * share)) / 2 if kind == "cosine" else 1 - share
            return lowest + (1 - lowest) * left

        rates = rates_of(Schedule(kind, warmup=warmup, min_ratio=lowest), total)
        assert rates == pytest.approx([PEAK * factor(i) for i in range(total)])


class TestEnds:
    @pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
    def test_warm_up_rises_evenly_and_ends_at_the_peak(self, kind: str) -> None:
        rates = rates_of(Schedule(kind, warmup=4))
        assert rates[:4] == pytest.approx([PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK])
        assert max(rates) == PEAK

    @pytest.mark.parametrize(
        ("kind", "warmup", "updates"), covering(["cosine", "linear", "constant", "one_cycle"], [0, 1, 2], [1, 2, 3, 4])
    )
    def test_the_shortest_runs_have_a_schedule_too(self, kind: str, warmup: int, updates: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a warm-up that is longer than the run
            rates = rates_of(Schedule(kind, warmup=warmup), updates)
        assert all(0 < rate <= PEAK * (1 + 1e-9) for rate in rates)


class TestLengths:
    @pytest.mark.parametrize(("warmup", "updates"), [("4 updates", 4), (0.25, 5), ("1 epoch", 10), (7, 7), (0.0, 0)])
    def test_warm_up_is_updates_a_share_or_an_interval(self, warmup: Any, updates: int) -> None:
        options = {"max_epochs": 2, "train": make_batches(10)}
        assert rates_of(Schedule(warmup=warmup), **options) == rates_of(Schedule(warmup=updates), **options)

    def test_the_schedule_counts_updates_under_accumulation(self) -> None:
        accumulated = rates_of(Schedule(warmup="1 epoch"), 12, plugins=[Accumulate(4)], max_epochs=2)
        assert accumulated == rates_of(Schedule(warmup=3), 6)

    def test_a_warm_up_longer_than_the_run_warns(self) -> None:
        with pytest.warns(UserWarning, match="warmup is 20 updates, but the run has only 10"):
            rates = rates_of(Schedule(warmup=20))
        assert rates == pytest.approx([PEAK * (i + 1) / 20 for i in range(10)])


class TestSeveralOptimizers:
    def test_each_optimizer_has_its_own_schedule(self) -> None:
        class Uneven(TinyGAN):
            def takes_turn(self, name: str, update: int) -> bool:
                return name == "discriminator" or update % 2 == 0

        rates: dict[str | None, list[float]] = {}
        fit(Uneven(lr=PEAK), train=_features(8), plugins=[Schedule("linear"), watched(rates)])
        line = [PEAK * (1 - i / 8) for i in range(8)]
        assert rates["discriminator"] == pytest.approx(line)
        assert rates["generator"] == pytest.approx(line[:4])

    def test_each_parameter_group_keeps_its_share_of_the_rate(self) -> None:
        class Groups(Classifier):
            def configure_optimizers(self) -> Any:
                first, last = self.net[0].parameters(), self.net[2].parameters()
                return SGD([{"params": first, "lr": 1.0}, {"params": last, "lr": 0.1}])

        ratios: list[float] = []

        @forge.on("edit_grads")
        def watch(step: forge.Step) -> None:
            first, last = step.optimizer.param_groups
            ratios.append(first["lr"] / last["lr"])

        for kind in ("cosine", "one_cycle"):
            fit(Groups(), train=make_batches(6), plugins=[Schedule(kind), watch])
        assert ratios == pytest.approx([10.0] * 12)


class TestOneCycleMomentum:
    @pytest.mark.parametrize(
        ("make", "first"),
        [
            (lambda p: SGD(p, lr=PEAK, momentum=0.9), {"momentum": 0.95}),
            (lambda p: Adam(p, lr=PEAK), {"betas": (0.95, 0.999)}),
            (lambda p: SGD(p, lr=PEAK), {"momentum": 0}),
            (lambda p: Adagrad(p, lr=PEAK), {}),
        ],
        ids=["sgd with momentum", "adam", "plain sgd", "adagrad"],
    )
    def test_momentum_is_cycled_only_where_the_optimizer_uses_it(self, make: Any, first: dict[str, Any]) -> None:
        class Own(Classifier):
            def configure_optimizers(self) -> Any:
                return make(self.parameters())

        seen: list[dict[str, Any]] = []

        @forge.on("edit_grads")
        def watch(step: forge.Step) -> None:
            seen.append({key: step.optimizer.param_groups[0][key] for key in first})

        fit(Own(), train=make_batches(6), plugins=[Schedule("one_cycle"), watch])
        assert seen[0] == first


class TestTheTasksSchedule:
    def test_kind_task_keeps_what_the_task_returned(self) -> None:
        assert rates_of(Schedule("task"), 6, ReturnsOne()) == pytest.approx(
            [PEAK] * 2 + [PEAK / 2] * 2 + [PEAK / 4] * 2
        )

    def test_kind_task_without_a_schedule_is_refused(self) -> None:
        with pytest.raises(ForgeError, match=r"Classifier\.configure_optimizers, but it returned none"):
            rates_of(Schedule("task"))

    def test_a_second_schedule_beside_the_tasks_is_refused(self) -> None:
        with pytest.raises(
            ForgeError, match=r"ReturnsOne.* returned StepLR, .*'schedule' is set to 'linear'.*kind=task"
        ):
            rates_of(Schedule("linear"), task=ReturnsOne())


class TestRefused:
    @pytest.mark.parametrize("kind", ["cosine", "linear", "one_cycle"])
    def test_an_unknown_length_is_refused_with_what_to_set(self, kind: str) -> None:
        with pytest.raises(ForgeError, match=rf"{kind} needs the number of updates.*Set max_updates"):
            rates_of(Schedule(kind), train=iter(make_batches(4)))

    @pytest.mark.parametrize("kind", ["constant", "step"])
    def test_a_shape_that_needs_no_length_runs_without_one(self, kind: str) -> None:
        assert len(rates_of(Schedule(kind, warmup=2, **_step(kind)), train=iter(make_batches(4)))) == 4

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kind": "cosin"}, "Did you mean 'cosine'"),
            ({"warmup": -1}, r"schedule\.warmup is -1\. Write updates as a whole number"),
            ({"warmup": 1.5}, r"schedule\.warmup is 1\.5"),
            ({"warmup": "10 min"}, "write it in updates or epochs"),
            ({"warmup": "soon"}, "'soon' is not an interval"),
            ({"min_ratio": 1.5}, "a share of the peak, from 0 to 1"),
            ({"kind": "step"}, "needs a step_size"),
            ({"kind": "step", "step_size": 0}, "at least 1"),
            ({"kind": "step", "step_size": 5, "gamma": 0.0}, "above 0"),
        ],
    )
    def test_a_senseless_option_is_refused_before_any_work(self, options: Any, message: str) -> None:
        with pytest.raises((RecipeError, ForgeError), match=message):
            Schedule(**options)

    def test_an_option_that_the_kind_does_not_use_warns(self) -> None:
        with pytest.warns(UserWarning, match="kind 'cosine' does not use step_size=100"):
            Schedule("cosine", step_size=100)


def _features(count: int) -> list[Any]:
    return [(torch.randn(4, 6), torch.zeros(4, dtype=torch.long)) for _ in range(count)]


def _step(kind: str) -> dict[str, Any]:
    return {"step_size": 3} if kind == "step" else {}
