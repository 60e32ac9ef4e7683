"""Optimizers: schedules at their right frequency, several by name, closures, replays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

import forge
from forge_plugins import Accumulate, Clip
from tests.support.tasks import Classifier, fit, make_batches, noting


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def rates_of(task: forge.TaskModule, **options: Any) -> list[float]:
    """The learning rate in force at each update."""

    watch, rates = noting("finalize_grads", lambda step: step.optimizer.param_groups[0]["lr"])
    plugins = [*options.pop("plugins", []), watch]
    fit(task, plugins=plugins, **options)
    return rates


def scheduled(make: Any, *when: Any) -> Classifier:
    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return (optimizer, make(optimizer), *when)

    return Scheduled(lr=0.1)


def halving(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda n: 0.5**n)


class TestSchedules:
    def test_a_schedule_steps_once_per_update_not_per_micro_batch(self) -> None:
        assert rates_of(scheduled(halving), train=make_batches(5), plugins=[Accumulate(2)]) == [1.0, 0.5, 0.25]

    def test_a_schedule_by_interval_steps_at_it(self) -> None:
        assert rates_of(scheduled(halving, "1 epoch"), train=make_batches(2), max_epochs=3) == [
            1,
            1,
            0.5,
            0.5,
            0.25,
            0.25,
        ]
        assert rates_of(scheduled(halving, "3 updates"), train=make_batches(4)) == [1, 1, 1, 0.5]

    def test_a_schedule_does_not_move_when_the_update_was_skipped(self) -> None:
        @forge.on("inspect_grads", mutates=True)
        def skip(step: forge.Step) -> None:
            if step.index == 1:
                step.skip_update("test")

        assert rates_of(scheduled(halving), plugins=[skip]) == [1.0, 0.5, 0.5, 0.25]

    def test_a_schedule_by_interval_moves_after_a_skipped_update(self) -> None:
        @forge.on("inspect_grads", mutates=True)
        def skip(step: forge.Step) -> None:
            if step.ends_epoch:
                step.skip_update("test")

        rates = rates_of(scheduled(halving, "1 epoch"), train=make_batches(2), max_epochs=3, plugins=[skip])
        assert rates == [1, 1, 0.5, 0.5, 0.25, 0.25]

    def test_a_plateau_schedule_without_validation_is_refused(self) -> None:
        with pytest.raises(forge.TaskError, match="has no val loader"):
            fit(scheduled(lambda o: ReduceLROnPlateau(o)))

    def test_a_plateau_schedule_watches_its_metric(self) -> None:
        def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
            return ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)

        class Stuck(Classifier):
            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
                return optimizer, plateau(optimizer), "val/constant"

            def validation_step(self, batch: Any) -> Any:
                return {"constant": 1.0}

        rates = rates_of(Stuck(), train=make_batches(1), val=make_batches(1), max_epochs=4)
        assert rates == [1.0, 1.0, 0.5, 0.25]

    def test_a_metric_that_does_not_exist_names_those_that_do(self) -> None:
        task = scheduled(lambda o: ReduceLROnPlateau(o), "val/f1")
        with pytest.raises(forge.TaskError, match=r"watches 'val/f1', but validation gave val/accuracy, val/loss"):
            fit(task, val=make_batches(1))

    def test_the_logged_rate_is_the_one_the_last_update_used(self) -> None:
        assert fit(scheduled(halving), train=make_batches(3)).metrics["lr"] == 0.25
        assert fit(scheduled(halving), train=make_batches(4), max_updates=3).metrics["lr"] == 0.25

    def test_rates_of_parameter_groups_are_told_apart(self) -> None:
        class Grouped(Classifier):
            def configure_optimizers(self) -> Any:
                groups = [{"params": self.net[0].parameters(), "lr": 0.1}, {"params": self.net[2].parameters()}]
                return torch.optim.SGD(groups, lr=0.2)

        metrics = fit(Grouped()).metrics
        assert (metrics["lr/0"], metrics["lr/1"]) == (0.1, 0.2)

    def test_rates_of_named_parameter_groups_go_by_their_names(self) -> None:
        class Grouped(Classifier):
            names: tuple[str, ...] = ("body", "head")

            def configure_optimizers(self) -> Any:
                parts = zip(self.names, (self.net[0], self.net[2]), (0.1, 0.2), strict=True)
                groups = [{"name": name, "params": part.parameters(), "lr": lr} for name, part, lr in parts]
                return torch.optim.SGD(groups)

        metrics = fit(Grouped()).metrics
        assert (metrics["lr/body"], metrics["lr/head"]) == (0.1, 0.2)
        Grouped.names = ("same", "same")
        assert fit(Grouped()).metrics["lr/1"] == 0.2


class Two(forge.TaskModule):
    """Two heads with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 3)
        self.steps: list[str] = []

    def training_step(self, batch: Any, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.steps.append(name)
        own, other = (self.a, self.b) if name == "a" else (self.b, self.a)
        assert own.weight.requires_grad
        assert not other.weight.requires_grad
        return F.cross_entropy(self.a(batch[0]) + self.b(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return {name: torch.optim.SGD(getattr(self, name).parameters(), lr=0.1) for name in "ab"}


class TestSeveral:
    def test_each_takes_its_turn_with_the_others_at_rest(self) -> None:
        task = Two()
        fit(task, train=make_batches(2), plugins=[Accumulate(2)])
        assert task.steps == ["a", "a", "b", "b"]
        assert task.a.weight.requires_grad
        assert task.b.weight.requires_grad

    def test_a_batch_is_prepared_once_for_all_of_them(self) -> None:
        prepared: list[int] = []

        class Counts(forge.Plugin):
            @forge.hookimpl(wrapper=True)
            def forge_prepare_batch(self) -> Any:
                prepared.append(1)
                return (yield)

        fit(Two(), train=make_batches(3), plugins=[Counts()])
        assert len(prepared) == 3

    def test_step_end_fires_once_and_says_who_stepped(self) -> None:

        class Turns(Two):
            def takes_turn(self, name: str, update: int) -> bool:
                return name == "a" or update % 2 == 1

        watch, seen = noting(
            "step_end", lambda step: (step.name, step.updated, step.updated_names, len(step.parameters()))
        )
        fit(Turns(), train=make_batches(2), plugins=[watch])
        assert seen == [(None, True, ("a",), 4), (None, True, ("a", "b"), 4)]

    def test_only_a_window_with_all_skipped_counts_as_skipped(self) -> None:
        @forge.on("inspect_grads", mutates=True)
        def skip(step: forge.Step) -> None:
            if step.name == "a" or step.index == 1:
                step.skip_update("test")

        trainer = forge.Trainer(max_epochs=1, plugins=[skip], run_dir=False)
        task = Two()
        before = copy.deepcopy(task)
        trainer.fit(task, make_batches(2))
        assert torch.equal(task.a.weight, before.a.weight)
        assert not torch.equal(task.b.weight, before.b.weight)
        assert trainer.progress.skipped == 1

    def test_a_dict_of_one_passes_the_name_too(self) -> None:
        class One(Two):
            def configure_optimizers(self) -> Any:
                return {"a": torch.optim.SGD(self.a.parameters())}

            def training_step(self, batch: Any, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
                self.steps.append(name)
                return F.cross_entropy(self.a(batch[0]), batch[1])

        task = One()
        with pytest.warns(UserWarning, match="in no optimizer"):
            fit(task, max_updates=1)
        assert task.steps == ["a"]

    def test_each_schedule_advances_with_its_own_optimizer(self) -> None:
        class Turns(Two):
            def configure_optimizers(self) -> Any:
                made = super().configure_optimizers()
                return {name: (optimizer, halving(optimizer)) for name, optimizer in made.items()}

            def takes_turn(self, name: str, update: int) -> bool:
                return name == "a" or update == 0

        metrics = fit(Turns(), train=make_batches(3)).metrics
        assert metrics["lr/a"] == pytest.approx(0.1 * 0.5**2)
        assert metrics["lr/b"] == pytest.approx(0.1 * 0.5)

    def test_metrics_and_norms_carry_the_name(self) -> None:
        metrics = fit(Two(), plugins=[Clip(0.1)]).metrics
        assert {"train/a/loss", "train/b/loss", "grad_norm/a/before", "grad_norm/b/after"} <= metrics.keys()


class WithLBFGS(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


class TestClosures:
    @pytest.mark.parametrize("clip", [None, 0.05])
    @pytest.mark.parametrize("window", [1, 2])
    def test_lbfgs_equals_its_hand_written_loop(self, window: int, clip: float | None) -> None:
        torch.manual_seed(0)
        ours = WithLBFGS()
        theirs = copy.deepcopy(ours)
        data = make_batches(4)
        fit(ours, data, plugins=[Accumulate(window), *([Clip(clip)] if clip else [])])

        optimizer = theirs.configure_optimizers()
        for start in range(0, 4, window):

            def closure(micros: Any = data[start : start + window]) -> torch.Tensor:
                optimizer.zero_grad()
                total = torch.zeros(())
                for micro in micros:
                    loss = theirs.training_step(micro)["loss"]
                    loss = loss / len(micros) if len(micros) > 1 else loss
                    loss.backward()
                    total = total + loss.detach()
                if clip:
                    torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
                return total

            optimizer.step(closure)
        assert same(ours, theirs)

    def test_metrics_are_recorded_once_per_closure_step(self) -> None:
        class Counted(WithLBFGS):
            def training_step(self, batch: Any) -> Any:
                return {**super().training_step(batch), "count": 1.0}

        trainer = forge.Trainer(max_updates=1, plugins=[Clip(1.0)], run_dir=False)

        watch, counted = noting("step_end", lambda step: step.trainer.means._sums["train/count"][1])
        trainer.stack.add(watch)
        trainer.fit(Counted(), make_batches(1, size=4))
        assert counted == [4]


class Dropping(Classifier):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(F.dropout(x, 0.5, self.training))


class TestReplays:
    def test_a_replay_draws_the_same_numbers_as_before(self) -> None:
        losses: list[torch.Tensor] = []

        class Twice(forge.Plugin):
            provides = ("second_pass",)

            @forge.hookimpl(wrapper=True)
            def forge_prepare_batch(self) -> Any:
                x, y = yield
                return x + torch.randn_like(x), y

            @forge.hookimpl
            def forge_train_step(self, step: forge.Step) -> bool:
                for replay in (False, True):
                    step.run_window(record=not replay, replay=replay)
                    assert step.loss is not None
                    losses.append(step.loss)
                step.finish()
                return True

        fit(Dropping(), plugins=[Twice(), Accumulate(2)])
        assert [a.item() for a in losses[::2]] == [a.item() for a in losses[1::2]]

    def test_a_replay_needs_the_owner_to_say_so(self) -> None:
        class Silent(forge.Plugin):
            @forge.hookimpl
            def forge_train_step(self, step: forge.Step) -> None:
                step.run_window()
                step.run_window(record=False, replay=True)

        with pytest.raises(RuntimeError, match="provides 'second_pass'"):
            fit(plugins=[Silent()])
