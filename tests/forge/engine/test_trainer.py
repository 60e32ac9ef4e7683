"""The Trainer: the rhythm, the verbs, counters, requests, logs."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge.contract.stack import EVENTS, SPECS
from forge_plugins import Accumulate
from tests.support.tasks import Classifier, fit, make_batches, noting


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
        "plan_step",
        *["build_loader"] * 2,
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


def test_left_over_gradients_do_not_enter_the_first_update() -> None:
    torch.manual_seed(0)
    clean = Classifier()
    dirty = copy.deepcopy(clean)
    for parameter in dirty.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    fit(clean)
    fit(dirty)
    assert all(torch.equal(a, b) for a, b in zip(clean.parameters(), dirty.parameters(), strict=True))


def test_metrics_are_means_over_the_interval_by_items() -> None:
    sink, logged = noting("log", lambda update, metrics: (update, metrics))

    class Sizes(Classifier):
        def training_step(self, batch: Any) -> Any:
            return {**super().training_step(batch), "size": len(batch[0])}

    uneven = make_batches(1, size=2) + make_batches(1, size=6) + make_batches(1, size=4)
    fit(Sizes(), uneven, plugins=[sink], log_every=2)
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

    look, alive = noting("boundary", lambda: tensors_with_a_graph(), every="20 updates")
    before = tensors_with_a_graph()  # what other tests left behind
    fit(Watch(), make_batches(50), log_every=1000, plugins=[look])
    assert len(alive) == 2
    assert all(now <= before for now in [*alive, tensors_with_a_graph()])


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_num_items_decides_the_weights_of_a_window(kind: Any) -> None:
    class Tokens(forge.TaskModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Any) -> Any:
            values, _ = batch
            return (self.weight * values).mean()

        def num_items(self, batch: Any) -> Any:
            return kind(batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    task = Tokens()
    micros = [(torch.tensor([1.0], dtype=torch.float64), 3), (torch.tensor([5.0], dtype=torch.float64), 1)]
    fit(task, micros, plugins=[Accumulate(2)])
    assert task.weight.item() == -(1.0 * 3 / 4 + 5.0 * 1 / 4)


def test_a_skipped_update_leaves_weights_and_is_counted() -> None:
    class Skip(forge.Plugin):
        @forge.hookimpl
        def forge_inspect_grads(self, step: forge.Step) -> None:
            if step.index == 1:
                step.skip_update("test")

    edit, edited = noting("edit_grads", lambda step: step.index)
    watch, updated = noting("step_end", lambda step: (step.updated, step.trainer.task.net[0].weight.detach().clone()))
    trainer = forge.Trainer(max_updates=3, plugins=[Skip(), edit, watch], run_dir=False)
    trainer.fit(Classifier(), make_batches())
    assert edited == [0, 2]
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


def test_splits_are_taken_in_the_place_of_loaders() -> None:
    batches = make_batches(3)
    by_hand, given = Classifier(), Classifier()
    given.load_state_dict(by_hand.state_dict())
    trainer = forge.Trainer(max_epochs=1, plugins=[], run_dir=False)
    trainer.fit(by_hand, batches, batches[:1])
    assert trainer.fit(given, forge.data.Splits(train=batches, val=batches[:1])).metrics
    assert all(torch.equal(x, y) for x, y in zip(by_hand.parameters(), given.parameters(), strict=True))


def test_a_trainer_whose_fit_failed_at_its_start_can_fit() -> None:
    trainer = forge.Trainer(max_epochs=1, plugins=[], run_dir=False)
    with pytest.raises(forge.ForgeError):
        trainer.fit(Classifier(), 5)
    assert trainer.fit(Classifier(), make_batches(2)).updates == 2
