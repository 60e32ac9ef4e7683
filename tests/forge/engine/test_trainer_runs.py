"""The Trainer: weights, run folders, errors, and hooks of plugins and tasks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import forge
from forge_plugins import Clip
from tests.support.tasks import Classifier, fit, make_batches, noting


def test_fit_writes_weights_that_the_other_verbs_read(tmp_path: Any) -> None:
    trainer = forge.Trainer(max_epochs=2, plugins=[], run_dir=tmp_path / "run")
    task, val = Classifier(), make_batches(2, seed=1)
    result = trainer.fit(task, make_batches(), val)
    weights = tmp_path / "run" / "weights.safetensors"
    assert result.run_dir == tmp_path / "run"
    fresh = forge.Trainer(plugins=[]).validate(Classifier(), val, weights=weights)
    assert fresh["val/loss"] == result.metrics["val/loss"]
    tested = forge.Trainer(plugins=[]).test(Classifier(), val, weights=weights)
    assert tested["test/loss"] == fresh["val/loss"]


def test_tied_weights_are_saved_and_loaded(tmp_path: Any) -> None:
    class Tied(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.alias = self.net[0]

    task = Tied()
    forge.Trainer(max_updates=1, plugins=[], run_dir=tmp_path).fit(task, make_batches())
    again = Tied()
    forge.Trainer(plugins=[]).validate(again, make_batches(), weights=tmp_path)
    assert torch.equal(again.alias.weight, task.net[0].weight)


def test_extra_state_views_and_lazy_layers_are_saved(tmp_path: Any) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None: ...

    class Odd(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(8), Extra(8, 3))
            self.register_buffer("mask", torch.ones(4, 4))

    task = Odd()
    task.mask = torch.ones(1).expand(4, 4)
    with pytest.warns(UserWarning, match="extra state of net.1"):
        forge.Trainer(max_updates=1, plugins=[], run_dir=tmp_path).fit(task, make_batches())
    again = Odd()
    again(make_batches()[0][0])  # makes the lazy layer
    forge.Trainer(plugins=[]).validate(again, make_batches(), weights=tmp_path)
    assert torch.equal(again.net[0].weight, task.net[0].weight)


def test_a_lazy_task_is_saved_and_resumed_to_the_same_bits(tmp_path: Any) -> None:
    class Sizeless(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    def fitted(folder: Path, updates: int) -> Any:
        task = Sizeless()
        options: dict[str, Any] = {"seed": 0, "run_dir": folder, "resume": "auto", "plugins": {"checkpoint": {}}}
        forge.Trainer(max_updates=updates, **options).fit(task, make_batches())
        return task.state_dict()

    whole = fitted(tmp_path / "whole", 4)
    fitted(tmp_path / "halves", 2)
    halves = fitted(tmp_path / "halves", 4)
    assert all(torch.equal(halves[name], value) for name, value in whole.items())


@pytest.mark.parametrize(("given", "meant"), [("max_update", "max_updates"), ("max_epoch", "max_epochs")])
def test_a_wrong_argument_is_answered_with_the_one_meant(given: str, meant: str) -> None:
    settings: dict[str, Any] = {given: 3}
    with pytest.raises(TypeError, match=f"takes no argument '{given}'. Did you mean '?{meant}"):
        forge.Trainer(**settings)


def test_another_trainer_may_use_the_task_in_between() -> None:
    seen: list[Any] = []

    @forge.on("boundary")
    def probe(trainer: forge.Trainer) -> None:
        forge.Trainer(plugins=[]).validate(trainer.task, make_batches(1))
        seen.append(trainer.task.trainer is trainer)

    fit(plugins=[probe], max_updates=2)
    assert seen == [True, True]


def test_a_run_folder_gets_a_card_for_people_and_for_programs(tmp_path: Any) -> None:
    import json

    forge.Trainer(max_updates=1, seed=5, plugins=[Clip(0.5)], run_dir=tmp_path).fit(Classifier(lr=0.2), make_batches())
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["seed"] == 5
    assert card["task"]["options"] == {"hidden": 8, "lr": 0.2}
    assert card["stack"][0]["name"] == "clip"
    assert card["stack"][0]["options"]["max_norm"] == 0.5
    assert "max_norm=0.5" in (tmp_path / "card.md").read_text()


def test_without_a_run_folder_nothing_is_written(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fit()
    assert not list(tmp_path.iterdir())


def test_one_trainer_can_fit_validate_and_fit_again() -> None:
    trainer = forge.Trainer(max_epochs=1, plugins=[Clip(1.0)], run_dir=False)
    task = Classifier()
    first = trainer.fit(task, make_batches())
    trainer.validate(task, make_batches())
    second = trainer.fit(task, make_batches())
    assert first.updates == second.updates == 4


def test_a_trainer_cannot_be_started_from_inside_its_own_run() -> None:
    class Nested(forge.Plugin):
        @forge.hookimpl
        def forge_step_end(self, step: forge.Step) -> None:
            step.trainer.validate(step.trainer.task, make_batches())

    with pytest.raises(forge.ForgeError, match="running fit already"):
        fit(plugins=[Nested()])


def test_end_runs_in_reverse_order_even_when_one_of_them_fails() -> None:
    ended: list[str] = []

    def make(label: str, fails: bool) -> forge.Plugin:
        class Ends(forge.Plugin):
            @forge.hookimpl
            def forge_end(self) -> None:
                ended.append(label)
                if fails:
                    raise OSError(f"{label} cannot close")

        plugin = Ends()
        plugin.name = label
        return plugin

    with pytest.raises(OSError, match="second cannot close"):
        fit(plugins=[make("first", True), make("second", True), make("third", False)])
    assert ended == ["third", "second", "first"]


def test_the_first_error_is_raised_and_observers_see_it() -> None:
    seen: list[BaseException] = []

    class Observer(forge.Plugin):
        @forge.hookimpl
        def forge_exception(self, error: BaseException) -> None:
            seen.append(error)
            raise OSError("the observer fails too")

    class Fails(Classifier):
        def training_step(self, batch: Any) -> Any:
            raise ZeroDivisionError("first cause")

    with pytest.raises(ZeroDivisionError, match="first cause") as caught:
        fit(Fails(), plugins=[Observer()])
    assert seen == [caught.value]


def test_tracing_goes_through_pluggy_and_prints_every_call() -> None:
    lines: list[str] = []
    trainer = forge.Trainer(max_updates=1, plugins=[Clip(1.0)], run_dir=False)
    trainer.trace = lines.append
    trainer.fit(Classifier(), make_batches())
    assert any("forge_edit_grads" in line for line in lines)


def test_the_stack_can_change_in_configure_and_only_there() -> None:
    class Adds(forge.Plugin):
        @forge.hookimpl
        def forge_configure(self, trainer: forge.Trainer) -> None:
            trainer.stack.add(Clip(0.1))

    class TooLate(forge.Plugin):
        @forge.hookimpl
        def forge_start(self, trainer: forge.Trainer) -> None:
            trainer.stack.add(Clip(0.1))

    trainer = forge.Trainer(max_updates=1, plugins=[Adds()], run_dir=False)
    assert "grad_norm/before" in trainer.fit(Classifier(), make_batches()).metrics
    assert "grad_norm/before" in trainer.fit(Classifier(), make_batches()).metrics
    assert trainer.stack.names == ["adds"]
    with pytest.raises(forge.StackError, match="fixed once forge_configure"):
        fit(plugins=[TooLate()])


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (TensorDataset(torch.zeros(4, 8)), r"train/own got the dataset TensorDataset itself\. Wrap it in a loader"),
        (3, "train/own got a int, which cannot be iterated"),
        ([], "The train/own loader is empty"),
    ],
)
def test_what_a_plugin_builds_in_place_of_a_loader_is_looked_at(made: Any, said: str) -> None:
    class Builds(forge.Plugin):
        @forge.hookimpl
        def forge_build_loader(self, stage: str) -> Any:
            return {"own": made}

    with pytest.raises(forge.DataError, match=said):
        fit(plugins=[Builds()])


def test_a_task_may_implement_hooks_itself_innermost() -> None:
    order: list[str] = []

    class Hooked(Classifier):
        @property
        def dangerous(self) -> int:
            raise AssertionError("registration must not touch properties")

        @forge.hookimpl
        def forge_step_end(self, step: forge.Step) -> None:
            order.append("task")

    @forge.on("step_end")
    def outer(step: forge.Step) -> None:
        order.append("callback")

    fit(Hooked(), max_updates=1, plugins=[outer])
    assert order == ["callback", "task"]


def test_a_copy_of_a_running_task_takes_no_trainer_with_it() -> None:
    copies: list[forge.TaskModule] = []

    @forge.on("step_end")
    def keep(step: forge.Step) -> None:
        assert step.trainer.task.trainer is step.trainer
        copies.append(copy.deepcopy(step.trainer.task))

    task = Classifier()
    fit(task, plugins=[keep], max_updates=1)
    assert copies[0].trainer is None
    assert task.trainer is None


def test_what_a_plugin_publishes_reaches_every_sink_at_once() -> None:
    @forge.on("step_end", every="2 updates")
    def make(step: forge.Step) -> None:
        step.trainer.publish({"shape": forge.Histogram.of(torch.ones(3)), "height": 2})

    sink, seen = noting("log", lambda update, metrics: (update, metrics))
    result = fit(plugins=[make, sink])
    assert [update for update, metrics in seen if "shape" in metrics] == [2, 4]
    assert result.metrics["height"] == 2
    assert "shape" not in result.metrics


@pytest.mark.parametrize("every", ["2 updates", "1 epoch", "9 samples"])
def test_an_interval_gives_one_answer_within_a_step(every: str) -> None:
    interval, answers = forge.Interval(every), []

    class Asks(forge.Plugin):
        """Asks everywhere."""

        @forge.hookimpl(wrapper=True)
        def forge_train_step(self, step: forge.Step) -> Any:
            answers.append([interval.due(step)])
            return (yield)

        @forge.hookimpl
        def forge_step_end(self, step: forge.Step) -> None:
            answers[-1].append(interval.due(step))

        @forge.hookimpl
        def forge_boundary(self, step: forge.Step) -> None:
            answers[-1].append(interval.due(step))

    fit(plugins=[Asks()], max_epochs=2)
    assert all(len(set(three)) == 1 for three in answers)
    assert {True, False} == {three[0] for three in answers}


def test_publish_reads_a_tensor_and_refuses_the_rest() -> None:
    seen: dict[str, Any] = {}

    @forge.on("step_end", every="4 updates")
    def make(step: forge.Step) -> None:
        step.trainer.publish({"tensor": torch.tensor(2.5), "numpy": np.float32(0.5)})
        with pytest.raises(forge.TaskError, match="got 'list' as a list"):
            step.trainer.publish({"list": [1]})

    @forge.on("log")
    def sink(metrics: dict[str, Any]) -> None:
        seen.update(metrics)

    fit(plugins=[make, sink])
    assert (seen["tensor"], seen["numpy"]) == (2.5, 0.5)
