"""ema and swa alike: the average is torch's own, bit for bit; training never notices; it is evaluated and exported."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import forge
from forge.checkpoint import Checkpoints, load_weights
from forge.checkpoint import StoredCheckpoint as SavedState
from forge.checkpoint.weights import read_weights
from forge.errors import RecipeError, StackError
from forge.testing import TinyGAN, TinyTask, assert_same, first_difference, fit_tiny, tiny_batches
from forge_plugins import EMA, SWA, Accumulate, Checkpoint, Guard
from tests.support import averages_kit, reference
from tests.support.averages import (
    Watched,
    applied,
    by_hand,
    loss_of,
    parameters,
    skipping,
    train,
)
from tests.support.averages_kit import Half, Kind, Thawing
from tests.support.profiles import some

kind = averages_kit.kind


# -- the arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2])
def test_the_average_is_torchs_own_bit_for_bit(kind: Kind, window: int) -> None:
    plugin = kind.make(start=2)
    task, _ = fit_tiny([plugin, Accumulate(window)])
    expected = by_hand(kind.by_torch, lambda update: update > 2, window=window)
    assert_same(parameters(applied(plugin, task)), parameters(expected.module))


def test_a_skipped_update_is_no_update(kind: Kind) -> None:
    plugin, model = kind.make(), TinyTask(dropout=0.0)
    task, _ = fit_tiny([plugin, skipping(0, 3, 4)], task=TinyTask(dropout=0.0))
    levers = reference.Levers(left_out=(0, 3, 4), decay=0.9 if kind.name == "ema" else None)
    levers.swa_every = None if levers.decay else 1
    outcome = reference.train_with_levers(model, loss_of, model.configure_optimizers(), tiny_batches(), 2, levers, 0)
    assert_same(list(parameters(applied(plugin, task)).values()), outcome.average)


def test_with_two_optimizers_all_parameters_are_averaged(kind: Kind) -> None:
    plugin = kind.make(start=5)
    gan, _ = fit_tiny([plugin], task=TinyGAN())
    hand = TinyGAN()
    mean = kind.by_torch(hand)
    hand.loss = lambda real, name: TinyGAN.training_step(hand, (real, None), name)["loss"]
    optimizers = hand.configure_optimizers()
    torch.manual_seed(0)
    for update, batch in enumerate([x for x, _ in tiny_batches()] * 2):
        reference.train_gan(hand, optimizers, [batch], 1)
        if update >= 5:
            mean.update_parameters(hand)
    assert_same(gan, hand)
    assert_same(applied(plugin, gan), mean.module)


def test_weights_that_get_other_memory_are_averaged(kind: Kind) -> None:
    @forge.on("step_end", mutates=True)
    def rebind(step: forge.Step) -> None:
        for parameter in step.parameters():
            parameter.data = parameter.data.clone()

    plugin = kind.make()
    task, _ = fit_tiny([rebind, plugin])
    assert_same(parameters(applied(plugin, task)), parameters(by_hand(kind.by_torch).module))


def test_half_precision_is_averaged_in_float32(kind: Kind, tmp_path: Path) -> None:
    plugin = kind.make()
    task, _ = fit_tiny([plugin, Checkpoint()], task=Half(), run_dir=tmp_path)
    model, mean = Half(), Half().float()
    average = kind.by_torch(mean)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in tiny_batches() * 2:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        mean.load_state_dict(model.state_dict())
        average.update_parameters(mean)
    saved = SavedState.find(tmp_path).load()["plugins"][kind.name]["weights"]
    assert_same(saved, parameters(average.module))
    low = {name: tensor.to(torch.bfloat16) for name, tensor in saved.items()}
    assert_same(applied(plugin, task), low)
    assert_same(load_file(tmp_path / "weights.safetensors"), low)
    assert_same(read_weights(tmp_path / "checkpoints" / "latest", kind.name).tensors, low)


def test_lazy_modules_are_averaged_once_they_have_a_shape(kind: Kind) -> None:
    class Lazy(TinyTask):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 3))

        def configure_optimizers(self) -> Any:
            self(torch.zeros(1, 6))
            return super().configure_optimizers()

    plugin = kind.make()
    task, _ = fit_tiny([plugin], task=Lazy())
    assert first_difference(applied(plugin, task), task)


# -- frozen parameters ------------------------------------------------------------------------------------------------


def thawing(phase: str) -> forge.Plugin:
    """Thaws at update 4, in this phase."""

    @forge.on(phase, mutates=True)
    def thaw(trainer: forge.Trainer) -> None:
        if trainer.progress.update == 4:
            trainer.task.net[0].requires_grad_(True)

    @forge.on(phase, mutates=True)
    def thaw_step(step: forge.Step) -> None:
        if step.trainer.progress.update == 4:
            step.trainer.task.net[0].requires_grad_(True)

    return thaw if phase == "boundary" else thaw_step


@pytest.mark.parametrize(
    ("phase", "thawed_first", "start"),
    some([("step_end", True, 0), ("step_end", False, 6), ("boundary", True, 6), ("boundary", False, 0)], quick=2),
)
def test_a_thawed_parameter_is_averaged_as_if_it_always_was(
    kind: Kind, phase: str, thawed_first: bool, start: int
) -> None:
    plugin = kind.make(start=start)
    stack = [thawing(phase), plugin] if thawed_first else [plugin, thawing(phase)]
    task, _ = fit_tiny(stack, task=Thawing())
    model = Thawing()
    mean = kind.by_torch(model)

    def after(update: int) -> None:
        if update > start:
            mean.update_parameters(model)
        if update == 4:
            model.net[0].requires_grad_(True)

    train(model, after)
    assert_same(task, model)
    ours, theirs = parameters(applied(plugin, task)), parameters(mean.module)
    assert_same(ours, theirs)


def test_frozen_parameters_take_no_place_in_checkpoints(kind: Kind, tmp_path: Path) -> None:
    plugin = kind.make()
    task, _ = fit_tiny([plugin, Checkpoint()], task=Thawing(), run_dir=tmp_path)
    saved = SavedState.find(tmp_path).load()["plugins"][kind.name]["weights"]
    assert not [name for name in saved if name.startswith("net.0.")]
    assert {"net.1.bias", "net.1.weight", "net.4.bias", "net.4.weight"} <= saved.keys()
    exported = TinyTask.from_checkpoint(tmp_path / "checkpoints" / "latest", weights=kind.name)
    assert_same(parameters(exported), parameters(applied(plugin, task)))
    assert torch.equal(exported.state_dict()["net.0.weight"], task.state_dict()["net.0.weight"])


# -- swapped in, put back ---------------------------------------------------------------------------------------------


def test_validation_is_of_the_average_in_its_place(kind: Kind) -> None:
    task = Watched()
    places = [p.data_ptr() for p in task.parameters()]
    fit_tiny([kind.make()], task=task)
    expected = parameters(by_hand(kind.by_torch).module)
    assert_same({name: task.seen[-1][name] for name in expected}, expected)
    assert task.places == [places] * 2


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_the_evaluation_leaves_the_trained_weights(kind: Kind, error: type[BaseException]) -> None:
    class Breaks(TinyTask):
        def validation_step(self, batch: Any) -> Any:
            raise error

    task, plain = Breaks(), TinyTask()
    with pytest.raises(error):
        fit_tiny([kind.make()], task=task)
    fit_tiny([], task=plain, max_updates=5)
    assert_same(task, plain)


# -- out of the run ---------------------------------------------------------------------------------------------------


def test_the_average_is_exported_and_trained_weights_saved(kind: Kind, tmp_path: Path) -> None:
    plugin = kind.make()
    task, _ = fit_tiny([plugin, Checkpoint(keep=5)], run_dir=tmp_path)
    averaged = applied(plugin, task)
    assert_same(load_file(tmp_path / "weights.safetensors"), averaged)
    assert_same(TinyTask.from_checkpoint(tmp_path), averaged)
    assert_same(TinyTask.from_checkpoint(tmp_path, weights=kind.name), averaged)
    assert_same(TinyTask.from_checkpoint(tmp_path, weights="raw"), task)
    latest = tmp_path / "checkpoints" / "latest"
    assert_same(TinyTask.from_checkpoint(latest), task)
    assert_same(TinyTask.from_checkpoint(latest, weights=kind.name), averaged)
    loaded = TinyTask(seed=9)
    load_weights(loaded, Checkpoints(tmp_path / "checkpoints").path(10), weights=kind.name)
    assert_same(loaded, averaged)
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        assert f'"average": "{kind.name}"' in file.metadata()["forge"]


def test_tied_weights_stay_tied_in_what_is_exported(kind: Kind, tmp_path: Path) -> None:
    class Tied(TinyTask):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.second = nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.second(self.first(x)))

    plugin = kind.make()
    task, _ = fit_tiny([plugin, Checkpoint()], task=Tied(), run_dir=tmp_path)
    averaged = applied(plugin, task)
    for source in (tmp_path, tmp_path / "checkpoints" / "latest"):
        loaded = Tied.from_checkpoint(source, weights=kind.name)
        assert_same(loaded, averaged)
        assert loaded.second.weight is loaded.first.weight


def test_apply_to_gives_the_average_to_any_task_that_fits(kind: Kind) -> None:
    plugin = kind.make()
    task, _ = fit_tiny([plugin])
    wide, other = TinyTask(seed=7).double(), nn.Linear(2, 2)
    plugin.apply_to(wide)
    assert_same(parameters(wide), {name: tensor.double() for name, tensor in parameters(applied(plugin, task)).items()})
    with pytest.raises(forge.TaskError, match=r"Linear has no net\.0\.weight of the fitted shape"):
        plugin.apply_to(other)


# -- resumed ----------------------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_precision_and_layout(kind: Kind, tmp_path: Path) -> None:
    class Images(Half):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    plugin = kind.make()
    for updates in (5, 10):
        fit_tiny([plugin, Checkpoint()], task=Images(), run_dir=tmp_path, max_updates=updates, resume="auto")
    kept = plugin._average.tensors
    assert kept["net.0.weight"].dtype is torch.float32
    assert kept["conv.weight"].is_contiguous(memory_format=torch.channels_last)


def test_going_back_to_a_checkpoint_takes_the_average_along(kind: Kind, tmp_path: Path) -> None:
    batches = tiny_batches([8] * 8)
    batches[5][0][3, 2] = math.nan
    plugin, expected = kind.make(), kind.make()
    saving = Checkpoint(every="2 updates", background=False)
    options = {"max_epochs": 1, "task": TinyTask(dropout=0.0)}
    task, _ = fit_tiny([plugin, Guard("rewind"), saving], train=batches, run_dir=tmp_path, **options)
    options["task"] = TinyTask(dropout=0.0)
    fit_tiny([expected], train=[batch for i, batch in enumerate(batches) if i != 5], **options)
    assert_same(parameters(applied(plugin, task)), parameters(applied(expected, task)))
    exported = load_file(tmp_path / "weights.safetensors")  # although a pass over the data meets the bad batch again
    assert all(tensor.isfinite().all() for tensor in exported.values())


# -- two averages, and options ----------------------------------------------------------------------------------------


def test_a_second_average_is_kept_beside_the_first(tmp_path: Path) -> None:
    plugins = forge.config.build.make_plugins({"ema@slow": {"decay": 0.99, "evaluate": False}, "ema": {"decay": 0.5}})
    task, result = fit_tiny([*plugins, Checkpoint()], run_dir=tmp_path)
    alone, slow = EMA(0.5), EMA(0.99)
    assert fit_tiny([alone])[1].metrics == result.metrics
    fit_tiny([slow])
    assert_same(TinyTask.from_checkpoint(tmp_path), applied(alone, task))
    assert_same(TinyTask.from_checkpoint(tmp_path, weights="ema@slow"), applied(slow, task))


@pytest.mark.parametrize("evaluated", ["ema", "swa"])
def test_ema_and_swa_can_both_be_kept(tmp_path: Path, evaluated: str) -> None:
    ema, swa = EMA(0.9, evaluate=evaluated == "ema"), SWA(0, evaluate=evaluated == "swa")
    task, _ = fit_tiny([ema, swa, Checkpoint()], run_dir=tmp_path)
    for name, plugin in (("ema", ema), ("swa", swa)):
        assert_same(parameters(TinyTask.from_checkpoint(tmp_path, weights=name)), parameters(applied(plugin, task)))
    assert_same(
        TinyTask.from_checkpoint(tmp_path), TinyTask.from_checkpoint(tmp_path / "checkpoints/latest", weights=evaluated)
    )


@pytest.mark.parametrize(
    ("plugin", "options", "message"),
    [
        (EMA, {"decay": 1.0}, r"ema\.decay is 1"),
        (EMA, {"decay": -0.1}, r"ema\.decay is -0\.1"),
        (EMA, {"every": 0}, r"ema\.every is 0"),
        (EMA, {"start": -1}, r"ema\.start is -1"),
        (EMA, {"start": 1.5}, r"ema\.start is 1\.5.*share of the run"),
        (EMA, {"start": "10 min"}, r"ema\.start is '10 min'; write it in updates or epochs"),
        (EMA, {"buffers": "none"}, r"buffers"),
        (SWA, {"start": 1.0}, r"swa\.start is 1\.0"),
        (SWA, {"start": "1 h"}, r"swa\.start is '1 h'"),
        (SWA, {"every": "10 min"}, r"swa\.every is '10 min'; write it in updates, epochs or samples"),
        (SWA, {"lr": 0.0}, r"swa\.lr is 0; it must be above 0"),
        (SWA, {"anneal": -1}, r"swa\.anneal is -1"),
        (SWA, {"update_bn": 0}, r"swa\.update_bn is 0"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(plugin: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        plugin(**options)


@pytest.mark.parametrize("make", [lambda: EMA(0.9), lambda: SWA(1)], ids=["ema", "swa"])
def test_a_schedule_free_optimizer_is_refused(make: Callable[[], forge.Plugin]) -> None:
    class ScheduleFree(torch.optim.SGD):
        def train(self) -> None: ...

        def eval(self) -> None: ...

    class Free(TinyTask):
        def configure_optimizers(self) -> Any:
            return ScheduleFree(self.parameters(), lr=0.1)

    with pytest.raises(StackError, match=r"a schedule-free optimizer .* evaluates an average of its own"):
        fit_tiny([make()], task=Free())
