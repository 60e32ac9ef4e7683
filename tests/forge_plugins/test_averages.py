"""ema and swa alike: the average is torch's own, bit for bit; training never notices; it is evaluated and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import forge
from forge.checkpoint import StoredCheckpoint as SavedState
from forge.checkpoint.weights import read_weights
from forge.testing import TinyGAN, TinyTask, assert_same_weights, first_difference, fit_tiny, tiny_batches
from forge_plugins import Accumulate, Checkpoint
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
    assert_same_weights(parameters(applied(plugin, task)), parameters(expected.module))


def test_a_skipped_update_is_no_update(kind: Kind) -> None:
    plugin, seen = kind.make(), kind.make()
    skipped, _ = fit_tiny([plugin, skipping(0, 3, 4)], task=TinyTask(dropout=0.0))
    model = TinyTask(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mean = kind.by_torch(model)
    for update, batch in enumerate(tiny_batches() * 2):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if update not in (0, 3, 4):
            optimizer.step()
            mean.update_parameters(model)
    assert_same_weights(parameters(applied(plugin, skipped)), parameters(mean.module))
    fit_tiny([seen], task=TinyTask(dropout=0.0))
    assert first_difference(parameters(applied(seen, skipped)), parameters(mean.module))


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
    assert_same_weights(gan, hand)
    assert_same_weights(applied(plugin, gan), mean.module)


def test_weights_that_get_other_memory_are_averaged(kind: Kind) -> None:
    @forge.on("step_end", mutates=True)
    def rebind(step: forge.Step) -> None:
        for parameter in step.parameters():
            parameter.data = parameter.data.clone()

    plugin = kind.make()
    task, _ = fit_tiny([rebind, plugin])
    assert_same_weights(parameters(applied(plugin, task)), parameters(by_hand(kind.by_torch).module))


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
    assert_same_weights(saved, parameters(average.module))
    low = {name: tensor.to(torch.bfloat16) for name, tensor in saved.items()}
    assert_same_weights(applied(plugin, task), low)
    assert_same_weights(load_file(tmp_path / "weights.safetensors"), low)
    assert_same_weights(read_weights(tmp_path / "checkpoints" / "latest", kind.name).tensors, low)


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
    assert_same_weights(task, model)
    ours, theirs = parameters(applied(plugin, task)), parameters(mean.module)
    assert_same_weights(ours, theirs)


def test_frozen_parameters_take_no_place_in_checkpoints(kind: Kind, tmp_path: Path) -> None:
    plugin = kind.make()
    task, _ = fit_tiny([plugin, Checkpoint()], task=Thawing(), run_dir=tmp_path)
    saved = SavedState.find(tmp_path).load()["plugins"][kind.name]["weights"]
    assert not [name for name in saved if name.startswith("net.0.")]
    assert {"net.1.bias", "net.1.weight", "net.4.bias", "net.4.weight"} <= saved.keys()
    exported = TinyTask.from_checkpoint(tmp_path / "checkpoints" / "latest", weights=kind.name)
    assert_same_weights(parameters(exported), parameters(applied(plugin, task)))
    assert torch.equal(exported.state_dict()["net.0.weight"], task.state_dict()["net.0.weight"])


# -- swapped in, put back ---------------------------------------------------------------------------------------------


def test_validation_is_of_the_average_in_its_place(kind: Kind) -> None:
    task = Watched()
    places = [p.data_ptr() for p in task.parameters()]
    fit_tiny([kind.make()], task=task)
    expected = parameters(by_hand(kind.by_torch).module)
    assert_same_weights({name: task.seen[-1][name] for name in expected}, expected)
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
    assert_same_weights(task, plain)
