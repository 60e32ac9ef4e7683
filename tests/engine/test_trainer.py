"""The Trainer: the rhythm, the verbs, counters, requests, logs."""

from __future__ import annotations

import copy
import gc
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import forge
from forge.contract.stack import EVENTS, SPECS
from forge_plugins import Accumulate, Clip
from tests.support.tasks import Classifier, fit, make_batches


def recorder(*names: str) -> tuple[forge.Plugin, list[str]]:
    """A plugin that writes down every hook it sees."""
    calls: list[str] = []

    def event(name: str) -> Any:
        def hook(self: Any) -> None:
            calls.append(name.removeprefix("forge_"))

        return forge.hookimpl(hook)

    def action(name: str) -> Any:
        def hook(self: Any) -> Any:
            calls.append(name.removeprefix("forge_"))
            return (yield)

        return forge.hookimpl(wrapper=True)(hook)

    chosen = names or SPECS
    body = {name: event(name) if name in EVENTS else action(name) for name in chosen}
    return type("Recorder", (forge.Plugin,), body)(), calls


def test_the_rhythm_fires_every_hook_in_its_place() -> None:
    plugin, calls = recorder()
    fit(train=make_batches(3), val=make_batches(1), plugins=[plugin, Accumulate(2)])
    micro = ["prepare_batch", "micro_step", "forward", "backward"]
    gradients = ["finalize_grads", "inspect_grads", "edit_grads", "optimizer_step"]
    assert calls == [
        "configure",
        "setup_env",
        *["build_model"] * 5,
        *["build_loader"] * 2,
        "plan_step",
        "build_optimizers",
        "start",
        "state_dict",  # what could not be saved is refused before any work
        *["plan_step", "train_step", *micro, *micro, *gradients, "step_end", "boundary"],
        "state_dict",  # once more, now that the optimizers have theirs
        *["plan_step", "train_step", *micro, *gradients, "step_end", "log"],
        *["evaluate", "prepare_batch", "forward", "log", "boundary"],
        *["state_dict", "save"],
        "end",
    ]


def test_the_model_is_built_in_order_and_moves_after_surgery() -> None:
    seen: list[str] = []

    class Phases(forge.Plugin):
        @forge.hookimpl
        def forge_build_model(self, build: Any, phase: str) -> None:
            assert build.model.task is build.task
            seen.append(phase)

    fit(plugins=[Phases()])
    assert seen == ["surgery", "shard", "remat", "compile", "parallel"]


def test_counters_count_micro_batches_updates_samples_and_epochs() -> None:
    trainer = forge.Trainer(max_epochs=2, plugins=[Accumulate(2)], run_dir=False)
    result = trainer.fit(Classifier(), make_batches(5, size=3))
    progress = trainer.progress
    assert (progress.micro, progress.update, progress.sample, progress.epoch) == (10, 6, 30, 2)
    assert (result.updates, result.epochs, result.stop_reason) == (6, 2, "max_epochs")


def test_max_updates_stops_in_the_middle_of_an_epoch() -> None:
    result = fit(max_epochs=3, max_updates=6)
    assert (result.updates, result.epochs, result.stop_reason) == (6, 1, "max_updates")


def test_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(forge.ForgeError, match="max_epochs nor max_updates"):
        fit(max_epochs=None)


@pytest.mark.parametrize("option", ["max_epochs", "max_updates", "log_every"])
def test_settings_below_one_are_refused_by_name(option: str) -> None:
    with pytest.raises(forge.ForgeError, match=f"{option}=0"):
        fit(**{option: 0})


def test_planned_updates_count_short_last_windows() -> None:
    trainer = forge.Trainer(max_epochs=3, plugins=[Accumulate(2)], run_dir=False)
    result = trainer.fit(Classifier(), make_batches(5))
    assert trainer.planned_updates == result.updates == 9


def test_the_seed_makes_two_runs_equal_numpy_included() -> None:
    drawn = []

    class Draws(Classifier):
        def training_step(self, batch: Any) -> Any:
            drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
            return super().training_step(batch)

    fit(Draws(), seed=3, max_updates=2)
    fit(Draws(), seed=3, max_updates=2)
    assert drawn[:2] == drawn[2:]


def test_left_over_gradients_do_not_enter_the_first_update() -> None:
    torch.manual_seed(0)
    clean = Classifier()
    dirty = copy.deepcopy(clean)
    for parameter in dirty.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    fit(clean)
    fit(dirty)
    assert all(torch.equal(a, b) for a, b in zip(clean.parameters(), dirty.parameters(), strict=True))


def test_a_task_left_in_eval_mode_is_trained_in_train_mode() -> None:
    modes = []

    class Watch(Classifier):
        def training_step(self, batch: Any) -> Any:
            modes.append(self.net.training)
            return super().training_step(batch)

    task = Watch()
    task.eval()
    fit(task, max_updates=1)
    assert modes == [True]


def test_metrics_are_means_over_the_interval_by_items() -> None:
    logged: list[tuple[int, dict[str, Any]]] = []

    class Sink(forge.Plugin):
        @forge.hookimpl
        def forge_log(self, update: int, metrics: dict[str, Any]) -> None:
            logged.append((update, metrics))

    class Sizes(Classifier):
        def training_step(self, batch: Any) -> Any:
            return {**super().training_step(batch), "size": len(batch[0])}

    uneven = make_batches(1, size=2) + make_batches(1, size=6) + make_batches(1, size=4)
    fit(Sizes(), uneven, plugins=[Sink()], log_every=2)
    assert [update for update, _ in logged] == [2, 3]
    assert logged[0][1]["train/size"] == pytest.approx((2 * 2 + 6 * 6) / 8)
    assert logged[1][1]["train/size"] == 4
    assert logged[0][1]["lr"] == 0.1


def test_recorded_values_are_unweighted_means() -> None:
    @forge.on("step_end")
    def watch(step: forge.Step) -> None:
        step.record("index", step.index)

    assert fit(plugins=[watch], log_every=4).metrics["index"] == pytest.approx(1.5)


def tensors_with_a_graph() -> set[int]:
    gc.collect()
    return {id(o) for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.grad_fn is not None}


def test_logging_a_loss_keeps_no_graph_alive() -> None:
    class Watch(Classifier):
        def training_step(self, batch: Any) -> Any:
            output = super().training_step(batch)
            return {**output, "twin": output["loss"] * 1}

    alive: list[set[int]] = []

    @forge.on("boundary", every="20 updates")
    def look() -> None:
        alive.append(tensors_with_a_graph())

    before = tensors_with_a_graph()  # what other tests left behind
    fit(Watch(), make_batches(50), log_every=1000, plugins=[look])
    assert len(alive) == 2
    assert all(now <= before for now in [*alive, tensors_with_a_graph()])


def test_num_items_decides_the_weights_of_a_window() -> None:
    class Tokens(forge.TaskModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Any) -> Any:
            values, _ = batch
            return (self.weight * values).mean()

        def num_items(self, batch: Any) -> int:
            return batch[1]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    task = Tokens()
    micros = [(torch.tensor([1.0], dtype=torch.float64), 3), (torch.tensor([5.0], dtype=torch.float64), 1)]
    fit(task, micros, plugins=[Accumulate(2)])
    assert task.weight.item() == -(1.0 * 3 / 4 + 5.0 * 1 / 4)


def test_num_items_may_be_a_tensor() -> None:
    class Tokens(Classifier):
        def num_items(self, batch: Any) -> torch.Tensor:
            return (batch[1] > 0).sum()

    torch.manual_seed(0)
    task = Tokens()
    twin = copy.deepcopy(task)
    data = make_batches(2, size=5)
    counts = [int((y > 0).sum()) for _, y in data]
    fit(task, data, plugins=[Accumulate(2)])
    for batch, count in zip(data, counts, strict=True):
        (twin.training_step(batch)["loss"] * (torch.tensor(count) / sum(counts))).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert all(torch.equal(a, b) for a, b in zip(task.parameters(), twin.parameters(), strict=True))


def test_a_skipped_update_leaves_weights_and_is_counted() -> None:
    class Skip(forge.Plugin):
        @forge.hookimpl
        def forge_inspect_grads(self, step: forge.Step) -> None:
            if step.index == 1:
                step.skip_update("test")

    updated = []

    @forge.on("step_end")
    def watch(step: forge.Step) -> None:
        updated.append((step.updated, step.trainer.task.net[0].weight.detach().clone()))

    trainer = forge.Trainer(max_updates=3, plugins=[Skip(), watch], run_dir=False)
    trainer.fit(Classifier(), make_batches())
    assert [flag for flag, _ in updated] == [True, False, True]
    assert torch.equal(updated[0][1], updated[1][1])
    assert trainer.progress.skipped == 1
    assert [(r.kind, r.asker, r.reason, r.update) for r in trainer.requests.log] == [("skip_update", "skip", "test", 1)]


def test_a_stop_is_granted_after_the_update_and_names_the_asker() -> None:
    @forge.on("step_end", every="3 updates")
    def enough(step: forge.Step) -> None:
        step.trainer.request_stop("three are enough")

    result = fit(max_epochs=5, plugins=[enough])
    assert (result.updates, result.stop_reason) == (3, "enough: three are enough")


def test_a_task_can_ask_too() -> None:
    class Impatient(Classifier):
        def training_step(self, batch: Any) -> Any:
            assert self.trainer is not None
            self.trainer.request_stop("seen enough")
            return super().training_step(batch)

    assert fit(Impatient()).stop_reason == "Impatient: seen enough"


def test_a_requested_validation_runs_once() -> None:
    plugin, calls = recorder("forge_evaluate")

    @forge.on("step_end", every="2 updates")
    def ask(step: forge.Step) -> None:
        step.trainer.request_validation("now")

    fit(train=make_batches(5), val=make_batches(1), plugins=[plugin, ask], validate_every=None)
    assert calls == ["evaluate"] * 2


def test_a_requested_checkpoint_captures_once_by_plugin() -> None:
    captured: list[dict[str, Any]] = []

    class Keeper(forge.Plugin):
        @forge.hookimpl
        def forge_boundary(self, trainer: forge.Trainer, step: forge.Step) -> None:
            if step.ends_epoch:
                trainer.request_checkpoint("epoch")

        @forge.hookimpl
        def forge_save(self, capture: dict[str, Any]) -> None:
            captured.append(capture)

        @forge.hookimpl
        def forge_state_dict(self) -> dict[str, Any]:
            return {"kept": len(captured)}

    task = Classifier()
    fit(task, max_epochs=2, plugins=[Keeper()])
    assert [c["progress"]["epoch"] for c in captured] == [1, 2]
    assert captured[1]["plugins"] == {"keeper": {"kept": 1}}
    assert captured[1]["model"].keys() == task.state_dict().keys()
    assert "optimizer" in captured[1]["optimizers"][""]


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


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Any) -> None:
    forge.Trainer(max_updates=1, plugins=[], run_dir=tmp_path).fit(Classifier(), make_batches())
    with pytest.raises(forge.TaskError, match="does not fit Classifier"):
        forge.Trainer(plugins=[]).validate(Classifier(hidden=5), make_batches(), weights=tmp_path)


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


def test_natural_types_for_settings_are_taken(tmp_path: Any) -> None:
    settings = {"device": torch.device("cpu"), "seed": np.int64(3), "validate_every": forge.Interval("1 epoch")}
    trainer = forge.Trainer(max_updates=1, plugins=[], run_dir=tmp_path, **settings)
    assert trainer.fit(Classifier(), make_batches()).updates == 1
    assert (trainer.settings["device"], trainer.settings["seed"]) == ("cpu", 3)


@pytest.mark.parametrize(("given", "meant"), [("max_steps", "max_updates"), ("max_epoch", "max_epochs")])
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


def test_deterministic_is_on_during_the_run_and_put_back_after() -> None:
    seen = []

    @forge.on("step_end")
    def watch(step: forge.Step) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())

    fit(plugins=[watch], max_updates=1, deterministic=True)
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_tracing_goes_through_pluggy_and_prints_every_call() -> None:
    lines: list[str] = []
    trainer = forge.Trainer(max_updates=1, plugins=[Clip(1.0)], run_dir=False)
    trainer.trace = lines.append
    trainer.fit(Classifier(), make_batches())
    assert any("forge_edit_grads" in line for line in lines)


def test_traced_and_frozen_runs_end_in_the_same_bits() -> None:
    torch.manual_seed(0)
    task = Classifier()
    twin = copy.deepcopy(task)
    fit(task, plugins=[Clip(0.1), Accumulate(3)])
    trainer = forge.Trainer(max_epochs=1, plugins=[Clip(0.1), Accumulate(3)], run_dir=False)
    trainer.trace = lambda line: None
    trainer.fit(twin, make_batches())
    assert all(torch.equal(a, b) for a, b in zip(task.parameters(), twin.parameters(), strict=True))


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


def test_custom_autograd_and_double_backward_work() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * ctx.saved_tensors[0] * grad

    class Signed(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p -= group["lr"] * p.grad.sign()

    class Penalised(forge.TaskModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def training_step(self, batch: Any) -> Any:
            x = batch[0].clone().requires_grad_(True)
            out = Square.apply(x * self.weight).sum()  # pyright: ignore[reportOptionalMemberAccess]
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            return out + F.mse_loss(slope, torch.zeros_like(slope))

        def configure_optimizers(self) -> Any:
            return Signed(self.parameters(), {"lr": 0.01})

    task = Penalised()
    fit(task, max_updates=1)
    torch.testing.assert_close(task.weight.detach(), torch.full((8,), 0.99))


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


def test_a_skipped_update_is_not_edited() -> None:
    edited: list[int] = []

    @forge.on("inspect_grads", mutates=True)
    def skip(step: forge.Step) -> None:
        if step.index == 1:
            step.skip_update("test")

    @forge.on("edit_grads")
    def edit(step: forge.Step) -> None:
        edited.append(step.index)

    fit(plugins=[skip, edit])
    assert edited == [0, 2, 3]


def test_what_a_plugin_publishes_reaches_every_sink_at_once() -> None:
    seen: list[tuple[int, dict[str, Any]]] = []

    @forge.on("step_end", every="2 updates")
    def make(step: forge.Step) -> None:
        step.trainer.publish({"shape": forge.Histogram.of(torch.ones(3)), "height": 2})

    @forge.on("log")
    def sink(update: int, metrics: dict[str, Any]) -> None:
        seen.append((update, metrics))

    result = fit(plugins=[make, sink])
    assert [update for update, metrics in seen if "shape" in metrics] == [2, 4]
    assert result.metrics["height"] == 2
    assert "shape" not in result.metrics


def test_a_plugin_can_put_other_weights_in_place_for_the_export(tmp_path: Path) -> None:
    class Zeros(forge.Plugin):
        """Exports zeros."""

        @forge.hookimpl(wrapper=True)
        def forge_export(self, trainer: forge.Trainer) -> Any:
            kept = {name: value.clone() for name, value in trainer.task.state_dict().items()}
            for value in trainer.task.state_dict().values():
                value.zero_()
            yield
            trainer.task.load_state_dict(kept)
            return True

    task = Classifier()
    fit(task, plugins=[Zeros()], run_dir=tmp_path)
    exported = load_file(tmp_path / "weights.safetensors")
    assert all(not value.any() for value in exported.values())
    assert all(value.any() for value in task.state_dict().values())


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
