"""freeze before, after and beside other plugins, and what it refuses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge.errors import CheckpointError, RecipeError, StackError, TaskError
from forge.testing import TinyTask, fit_tiny
from forge_plugins import Checkpoint, Freeze
from tests.forge.snapshot.test_resume import PowerCut, cut_at
from tests.support.freeze_kit import Look, evaluating, frozen
from tests.support.tasks import Classifier
from tests.support.tasks import fit as task_fit


class Filtered(TinyTask):
    """Its optimizer has only what is trained at the start."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


# -- before, after and beside -----------------------------------------------------------------------------------------


def test_the_task_is_handed_back_with_the_flags_that_it_had() -> None:
    task = TinyTask()
    task.net[4].bias.requires_grad_(False)  # pyright: ignore
    look = Look()
    fit_tiny([Freeze("net.[014]", keep="net.0", thaw={"net.4": "2 updates"}), look], task=task)
    assert look.frozen[0] == {"net.1.weight", "net.1.bias", "net.4.weight", "net.4.bias"}
    assert look.frozen[-1] == {"net.1.weight", "net.1.bias", "net.4.bias"}  # what the user froze is not ours to thaw
    assert (frozen(task), evaluating(task)) == ({"net.4.bias"}, set())


@pytest.mark.parametrize("update", [1, 4])
def test_also_after_an_error(update: int) -> None:
    task = TinyTask()
    with pytest.raises(PowerCut):
        fit_tiny([Freeze("net.[01]", thaw="3 updates"), cut_at(update)], task=task)
    assert (frozen(task), evaluating(task)) == (set(), set())


def test_the_log_says_what_is_frozen_and_what_thaws(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="forge")
    fit_tiny([Freeze("net.[01]", thaw="1 epoch")])
    assert (
        "freeze: froze 4 of 6 parameters, 72 of 99 values, and the statistics of 1 module: "
        "net.0.weight, net.0.bias, net.1.weight and 1 more." in caplog.text
    )
    assert caplog.text.count("freeze: thawed") == 1
    assert "freeze: thawed 4 parameters after update 5, 72 values: net.0.weight" in caplog.text


def test_a_moment_that_the_run_never_comes_to_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    fit_tiny([Freeze("net.0", thaw={"*.weight": "2 epochs", "*.bias": "10 updates"})], max_epochs=2)
    assert "freeze.thaw: this run ends after 2 epochs, so parameters that thaw at 2 epochs never train" in caplog.text
    assert (
        "freeze.thaw: this run ends after 10 updates, so parameters that thaw at 10 updates never train" in caplog.text
    )
    caplog.clear()
    fit_tiny([Freeze("net.0", thaw={"*.weight": "1 epochs", "*.bias": "9 updates"})], max_epochs=2)
    assert "never trains" not in caplog.text


# -- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": "nett.0.*"}, "freeze.modules: 'nett.0.*' matches no parameter of TinyTask. Did you mean 'net.0'?"),
        ({"modules": ["net.0", "net.9"]}, "freeze.modules: 'net.9' matches no parameter of TinyTask. Did you mean"),
        ({"modules": "net.2"}, "freeze.modules: 'net.2' matches no parameter"),  # a ReLU
        ({"modules": "encoder"}, "matches no parameter of TinyTask. Its parameters are in net.0-1, net.4."),
        ({"modules": "net.0", "keep": "*.gamma"}, "freeze.keep: '*.gamma' matches no parameter"),
        ({"modules": "net.0", "thaw": {"nat.0": "1 epoch"}}, "freeze.thaw: 'nat.0' matches no parameter of TinyTask."),
        (
            {"modules": "net.0", "thaw": {"net.4": "1 epoch"}},
            "freeze.thaw: 'net.4' matches nothing that freeze.modules freezes.",
        ),
    ],
)
def test_a_pattern_without_a_match_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        fit_tiny([Freeze(**options)])
    assert message in str(caught.value)


def test_freezing_everything_is_refused() -> None:
    task = TinyTask()
    with pytest.raises(RecipeError) as caught:
        fit_tiny([Freeze("*", thaw="1 epoch")], task=task)
    assert str(caught.value) == (
        "freeze.modules='*' freezes every parameter of TinyTask. Name fewer, or keep some trained, for example with "
        "freeze.keep='net.4'."
    )
    assert frozen(task) == set()


@pytest.mark.parametrize("undo", ["net[0] = Linear", "train"])
def test_layers_replaced_by_another_plugin_are_refused(undo: str) -> None:
    class Surgeon(forge.Plugin):
        @forge.hookimpl
        def forge_build_model(self, trainer: forge.Trainer, phase: str) -> None:
            task: Any = trainer.task
            if phase == "surgery" and undo == "train":
                task.train()
            elif phase == "surgery":
                task.net[0] = nn.Linear(6, 8)

    freeze = Freeze("net.[01]")
    with pytest.raises(StackError, match="Move that plugin before freeze"):
        fit_tiny([freeze, Surgeon()])
    fit_tiny([Surgeon(), freeze])


def test_a_thaw_of_what_no_optimizer_has_is_refused_by_name() -> None:
    with pytest.raises(TaskError) as caught:
        fit_tiny([Freeze("net.0", thaw={"*.weight": "1 epoch"})], task=Filtered())
    assert str(caught.value) == (
        "freeze.thaw is to train net.0.weight later, but Filtered.configure_optimizers leaves it out. Give the "
        "optimizer all parameters, not only those with requires_grad; it skips parameters without a gradient."
    )
    fit_tiny([Freeze("net.0")], task=Filtered())


def test_a_resume_that_freezes_other_parts_is_refused_by_name(tmp_path: Path) -> None:
    def live(modules: str, **options: Any) -> Any:
        look = Look()
        stack = [Freeze(modules, thaw=options.pop("thaw", None)), Checkpoint(background=False), look]
        return fit_tiny(stack, run_dir=tmp_path, resume="auto", **options)[0], look

    live("net.0", max_epochs=1)
    with pytest.raises(CheckpointError, match=r"froze other parts .* differ in net\.0\.bias, net\.0\.weight, net\.1"):
        live("net.1", max_epochs=2)
    task, look = live("net.1", max_epochs=2, allow_inexact=True)
    assert (look.frozen[-1], look.evaluating[-1]) == ({"net.1.weight", "net.1.bias"}, {"net.1"})
    assert frozen(task) == set()
    _, look = live("net.1", max_epochs=3, thaw="4 updates")  # long past: it thaws with the first update
    assert look.frozen[1:] == [set()] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a value for 'modules'"),
        ({"modules": []}, r"freeze\.modules is empty"),
        ({"modules": 3}, "modules"),
        ({"modules": "a", "thaw": "10 min"}, r"freeze\.thaw is '10 min': write it in updates, epochs or samples"),
        ({"modules": "a", "thaw": {"a": "soon"}}, r"freeze\.thaw: 'soon' is not an interval"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Freeze(**options)


def test_a_frozen_optimizer_rests_until_the_thaw() -> None:
    class Two(Classifier):
        def training_step(self, batch: Any, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().training_step(batch)

        def configure_optimizers(self) -> Any:
            first, last = self.net[0].parameters(), self.net[2].parameters()
            return {"head": torch.optim.SGD(last, lr=0.1), "backbone": torch.optim.SGD(first, lr=0.1)}

    trained: list[tuple[str, ...]] = []

    @forge.on("step_end")
    def watch(step: forge.Step) -> None:
        trained.append(step.updated_names)

    with pytest.warns(UserWarning, match="SGD 'backbone' has no parameter that requires a gradient: it does nothing"):
        task_fit(Two(), plugins=[Freeze("net.0", thaw="2 updates"), watch])
    assert trained == [("head",), ("head",), ("head", "backbone"), ("head", "backbone")]
