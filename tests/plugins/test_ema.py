"""ema: the average is torch's own, bit for bit; the weights never notice; and what is evaluated and exported is it."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import forge
from forge.checkpoint import Checkpoints, load_weights
from forge.checkpoint import StoredCheckpoint as SavedState
from forge.checkpoint.weights import read_weights
from forge.contract.dispatch import Plugged
from forge.errors import RecipeError, StackError
from forge.testing import TinyGAN, TinyTask, assert_same_weights, check_plugin, first_difference, fit_tiny, tiny_batches
from forge_plugins import EMA, Accumulate, Checkpoint, Guard
from forge_plugins._average import Average
from tests.support import reference


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class AfterEachStep:
    """Stands where a hand-written loop has its schedule: `step` is called after each update."""

    def __init__(self, step: Callable[[], Any]):
        self.step = step


def by_hand(averaged: Callable[[nn.Module], AveragedModel], window: int = 1, epochs: int = 2) -> AveragedModel:
    """A TinyTask trained by a plain loop that averages after each update."""
    task = TinyTask()
    average = averaged(task)
    after = AfterEachStep(lambda: average.update_parameters(task))
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.9)
    reference.train(task, loss_of, optimizer, tiny_batches(), epochs, window=window, schedule=after, seed=0)
    return average


def applied(plugin: EMA, task: nn.Module) -> nn.Module:
    """A copy of the task with the average in it."""
    task = copy.deepcopy(task)
    plugin.apply_to(task)
    return task


def parameters(task: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in task.named_parameters()}


# -- the arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999])
def test_the_average_is_torchs_own_bit_for_bit(window: int, decay: float) -> None:
    plugin = EMA(decay)
    task, _ = fit_tiny([plugin, Accumulate(window)])
    expected = by_hand(lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)), window)
    assert_same_weights(applied(plugin, task), expected.module)


@given(
    decay=st.floats(0, 0.99),
    start=st.integers(0, 12),
    every=st.integers(1, 4),
    warmup=st.booleans(),
)
def test_start_every_and_warmup_are_what_a_plain_loop_does(decay: float, start: int, every: int, warmup: bool) -> None:
    plugin = EMA(decay, start=start, every=every, warmup=warmup)
    task, _ = fit_tiny([plugin])
    expected: list[Tensor] = []
    model, update, n = TinyTask(), 0, 0

    def average() -> None:
        nonlocal update, n
        update += 1
        if update <= start or update % every:
            return
        now = [p.detach().clone() for p in model.parameters()]
        if not expected:
            expected.extend(now)
        else:
            used = min(decay, (1 + n) / (10 + n)) if warmup else decay
            for mean, value in zip(expected, now, strict=True):
                mean.lerp_(value, 1 - used)
        n += 1

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference.train(model, loss_of, optimizer, tiny_batches(), 2, schedule=AfterEachStep(average), seed=0)
    if not expected:
        with pytest.raises(forge.ForgeError, match=r"ema has averaged nothing yet.*ema\.start"):
            plugin.apply_to(task)
        return
    names = [name for name, _ in model.named_parameters()]
    assert_same_weights(parameters(applied(plugin, task)), dict(zip(names, expected, strict=True)))


@pytest.mark.parametrize(("start", "updates"), [(0.5, 5), ("5 updates", 5), ("1 epoch", 5), (5, 5), (0.0, 0)])
def test_the_start_can_be_updates_a_share_or_an_interval(start: Any, updates: int) -> None:
    plugin, same = EMA(0.9, start=start), EMA(0.9, start=updates)
    task, _ = fit_tiny([plugin])
    fit_tiny([same])
    assert_same_weights(applied(plugin, task), applied(same, task))


def skipping(*updates: int) -> forge.Plugin:
    @forge.on("inspect_grads", mutates=True)
    def skip(step: forge.Step) -> None:
        if step.index in updates:
            step.skip_update("as told")

    return skip


def test_a_skipped_update_is_no_update() -> None:
    plugin, seen = EMA(0.5), EMA(0.5)
    skipped, _ = fit_tiny([plugin, skipping(0, 3, 4)], task=TinyTask(dropout=0.0))
    model = TinyTask(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for update, batch in enumerate(tiny_batches() * 2):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if update not in (0, 3, 4):
            optimizer.step()
            mean.update_parameters(model)
    assert_same_weights(parameters(applied(plugin, skipped)), parameters(mean.module))
    fit_tiny([seen], task=TinyTask(dropout=0.0))
    assert first_difference(parameters(applied(seen, skipped)), parameters(mean.module))


def test_with_two_optimizers_all_parameters_are_averaged() -> None:
    plugin = EMA(0.8)
    gan, _ = fit_tiny([plugin], task=TinyGAN())
    by_hand = TinyGAN()
    mean = AveragedModel(by_hand, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    by_hand.loss = lambda real, name: TinyGAN.training_step(by_hand, (real, None), name)["loss"]
    optimizers = by_hand.configure_optimizers()
    torch.manual_seed(0)
    for batch in [x for x, _ in tiny_batches()] * 2:
        reference.train_gan(by_hand, optimizers, [batch], 1)
        mean.update_parameters(by_hand)
    assert_same_weights(gan, by_hand)
    assert_same_weights(applied(plugin, gan), mean.module)


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_buffers_are_the_live_ones_or_averaged_like_weights(buffers: Any) -> None:
    plugin = EMA(0.7, buffers=buffers)
    task, _ = fit_tiny([plugin])
    mean = by_hand(lambda model: AveragedModel(model, multi_avg_fn=floats_only(0.7), use_buffers=True))
    averaged = applied(plugin, task).state_dict()
    expected = mean.module.state_dict() if buffers == "average" else task.state_dict()
    for name in ("net.1.running_mean", "net.1.running_var", "net.1.num_batches_tracked"):
        assert torch.equal(averaged[name], expected[name])


def floats_only(decay: float) -> Any:
    """torch's average, but what is no float is copied."""
    average = get_ema_multi_avg_fn(decay)

    def update(means: list[Tensor], now: list[Tensor], count: Any) -> None:
        if means[0].is_floating_point():
            average(means, now, count)
        else:
            torch._foreach_copy_(means, now)

    return update


class Recentred(TinyTask):
    """Puts another tensor in the place of its buffer at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(6))

    def training_step(self, batch: Any) -> Any:
        self.centre = self.centre * 0.5 + batch[0].mean(0) * 0.5
        return super().training_step((batch[0] - self.centre, batch[1]))


def test_a_buffer_that_is_replaced_is_averaged_all_the_same() -> None:
    plugin = EMA(0.5, buffers="average")
    task, _ = fit_tiny([plugin], task=Recentred())
    centre, mean = torch.zeros(6), None
    for x, _ in tiny_batches() * 2:
        centre = centre * 0.5 + x.mean(0) * 0.5
        mean = centre.clone() if mean is None else mean.lerp_(centre, 0.5)
    assert mean is not None
    assert torch.equal(applied(plugin, task).state_dict()["centre"], mean)
    assert torch.equal(task.state_dict()["centre"], centre)


def test_weights_that_get_other_memory_are_averaged_all_the_same() -> None:
    @forge.on("step_end", mutates=True)
    def rebind(step: forge.Step) -> None:
        for parameter in step.parameters():
            parameter.data = parameter.data.clone()

    plugin = EMA(0.9)
    task, _ = fit_tiny([rebind, plugin])
    expected = by_hand(lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
    assert_same_weights(applied(plugin, task), expected.module)


class Half(TinyTask):
    """bfloat16 weights without batch normalisation, which would mind."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(torch.bfloat16)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(torch.bfloat16)).float()


def test_half_precision_is_averaged_in_float32(tmp_path: Path) -> None:
    plugin = EMA(0.999)
    task, _ = fit_tiny([plugin, Checkpoint()], task=Half(), run_dir=tmp_path)
    model, mean = Half(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in tiny_batches() * 2:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        now = [p.detach().float() for p in model.parameters()]
        if mean is None:
            mean = now
        else:
            torch._foreach_lerp_(mean, now, 1 - 0.999)
    assert mean is not None
    saved = SavedState.find(tmp_path).load()["plugins"]["ema"]["weights"]
    assert_same_weights(saved, dict(zip(saved, mean, strict=True)))
    low = {name: tensor.to(torch.bfloat16) for name, tensor in saved.items()}
    assert_same_weights(applied(plugin, task), low)
    assert_same_weights(load_file(tmp_path / "weights.safetensors"), low)
    assert_same_weights(read_weights(tmp_path / "checkpoints" / "latest", "ema").tensors, low)


# -- frozen parameters ------------------------------------------------------------------------------------------------


class Thawing(TinyTask):
    """Its first layer is frozen until update 4, where it is thawed in whatever phase is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)


def thawing(phase: str) -> forge.Plugin:
    @forge.on(phase, mutates=True)
    def thaw(trainer: forge.Trainer) -> None:
        if trainer.progress.update == 4:
            trainer.task.net[0].requires_grad_(True)

    @forge.on(phase, mutates=True)
    def thaw_step(step: forge.Step) -> None:
        if step.trainer.progress.update == 4:
            step.trainer.task.net[0].requires_grad_(True)

    return thaw if phase == "boundary" else thaw_step


@pytest.mark.parametrize("phase", ["step_end", "boundary"])
@pytest.mark.parametrize("thawed_first", [True, False])
@pytest.mark.parametrize("start", [0, 6])
def test_a_thawed_parameter_is_averaged_as_if_it_always_had_been(phase: str, thawed_first: bool, start: int) -> None:
    plugin = EMA(0.9, start=start)
    stack = [thawing(phase), plugin] if thawed_first else [plugin, thawing(phase)]
    task, _ = fit_tiny(stack, task=Thawing())
    model, update = Thawing(), 0
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def after() -> None:
        nonlocal update
        update += 1
        if update > start:
            mean.update_parameters(model)
        if update == 4:
            model.net[0].requires_grad_(True)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference.train(model, loss_of, optimizer, tiny_batches(), 2, schedule=AfterEachStep(after), seed=0)
    assert_same_weights(task, model)
    assert_same_weights(parameters(applied(plugin, task)), parameters(mean.module))


def test_frozen_parameters_take_no_memory_and_no_place_in_checkpoints(tmp_path: Path) -> None:
    plugin = EMA(0.9)
    task, _ = fit_tiny([plugin, Checkpoint()], task=Thawing(), run_dir=tmp_path)
    saved = SavedState.find(tmp_path).load()["plugins"]["ema"]["weights"]
    assert sorted(saved) == ["net.1.bias", "net.1.weight", "net.4.bias", "net.4.weight"]
    exported = TinyTask.from_checkpoint(tmp_path / "checkpoints" / "latest", weights="ema")
    assert_same_weights(exported, applied(plugin, task))
    assert torch.equal(exported.state_dict()["net.0.weight"], task.state_dict()["net.0.weight"])


# -- swapped in, put back ---------------------------------------------------------------------------------------------


def test_training_is_untouched_bit_for_bit() -> None:
    plain, expected = fit_tiny([])
    task, result = fit_tiny([EMA(0.9)])
    assert_same_weights(task, plain)
    train = {name: value for name, value in expected.metrics.items() if not name.startswith("val/")}
    assert {name: result.metrics[name] for name in train} == train
    assert result.metrics["val/loss"] != expected.metrics["val/loss"]


class Watched(TinyTask):
    """Remembers what each validation used, and where it lay."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Tensor]] = []
        self.places: list[list[int]] = []

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        self.seen.append({name: tensor.clone() for name, tensor in self.state_dict().items()})
        self.places.append([p.data_ptr() for p in self.parameters()])
        return {}


def test_validation_is_of_the_average_with_the_live_buffers() -> None:
    plugin, task = EMA(0.9), Watched()
    places = [p.data_ptr() for p in task.parameters()]
    _, result = fit_tiny([plugin], task=task)
    expected = by_hand(lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))).module
    assert_same_weights(task.seen[-1], expected)
    assert task.places == [places] * 2
    expected.eval()
    batches, total = tiny_batches(seed=1), 0.0
    with torch.inference_mode():
        for batch in batches:
            total += loss_of(expected, batch).item() * len(batch[0])
    assert result.metrics["val/loss"] == total / sum(len(x) for x, _ in batches)


def test_before_the_start_the_trained_weights_are_evaluated(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forge")
    watched, plain = Watched(), Watched()
    fit_tiny([EMA(0.9, start="1 epoch")], task=watched)
    fit_tiny([], task=plain)
    assert_same_weights(watched.seen[0], plain.seen[0])
    assert first_difference(watched.seen[1], plain.seen[1])
    assert "ema: evaluates the averaged weights from update 10 on" in caplog.text


class Replacing(TinyTask):
    """Puts another tensor in the place of its buffer at every forward of an evaluation, and of training if asked."""

    calls: Tensor

    def __init__(self, in_training: bool) -> None:
        super().__init__()
        self.in_training = in_training
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_training or not self.training:
            self.calls = self.calls + 1
        return super().forward(x)


@pytest.mark.parametrize("in_training", [True, False])
@pytest.mark.parametrize("start", [0, 7])
def test_a_buffer_that_an_evaluation_replaces_is_put_back(tmp_path: Path, in_training: bool, start: int) -> None:
    task, plain = Replacing(in_training), Replacing(in_training)
    memory, plugin = task.calls, EMA(0.9, start=start, buffers="average")
    fit_tiny([plugin], task=task, run_dir=tmp_path)
    fit_tiny([], task=plain)
    assert_same_weights(parameters(task), parameters(plain))
    unseen = 5 if start else 0  # the validation before the average began is one of the trained weights
    assert task.calls.item() == (10 if in_training else 0) + unseen
    assert (task.calls is memory) == (not in_training and not start)
    fresh = Replacing(in_training)
    plugin.apply_to(fresh)
    assert_same_weights(fresh, load_file(tmp_path / "weights.safetensors"))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_the_evaluation_leaves_the_trained_weights(error: type[BaseException]) -> None:
    class Breaks(TinyTask):
        def validation_step(self, batch: Any) -> Any:
            raise error

    task, plain = Breaks(), TinyTask()
    with pytest.raises(error):
        fit_tiny([EMA(0.9)], task=task)
    fit_tiny([], task=plain, max_updates=5)
    assert_same_weights(task, plain)


def test_an_evaluation_inside_the_export_is_fine(tmp_path: Path) -> None:
    """Two in one another: each puts back what it found."""

    class EvaluatesAtTheEnd(forge.Plugin):
        """Validates once more as the weights are exported."""

        @forge.hookimpl(wrapper=True)
        def forge_export(self, trainer: forge.Trainer) -> Any:
            trainer.hooks.forge_evaluate(trainer, "val")
            return (yield)

    task, plain, plugin = Watched(), TinyTask(), EMA(0.9)
    fit_tiny([plugin, EvaluatesAtTheEnd()], task=task, run_dir=tmp_path)
    fit_tiny([], task=plain)
    assert_same_weights(task, plain)
    assert_same_weights(task.seen[-1], task.seen[-2])
    assert_same_weights(load_file(tmp_path / "weights.safetensors"), task.seen[-1])


def test_a_compiled_model_evaluates_the_average() -> None:
    results = []
    for compiled in (False, True):
        task = Watched()
        if compiled:
            task.net.compile(backend="eager")
        results.append(fit_tiny([EMA(0.9)], task=task)[1].metrics)
    assert results[0] == results[1]


def test_lazy_modules_are_averaged_once_they_have_a_shape() -> None:
    class Lazy(TinyTask):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 3))

        def configure_optimizers(self) -> Any:
            self(torch.zeros(1, 6))
            return super().configure_optimizers()

    plugin = EMA(0.9)
    task, _ = fit_tiny([plugin], task=Lazy())
    assert first_difference(applied(plugin, task), task)


# -- out of the run ---------------------------------------------------------------------------------------------------


def test_the_run_exports_the_average_and_saves_the_trained_weights(tmp_path: Path) -> None:
    plugin = EMA(0.9)
    task, _ = fit_tiny([plugin, Checkpoint()], run_dir=tmp_path)
    averaged = applied(plugin, task)
    assert_same_weights(load_file(tmp_path / "weights.safetensors"), averaged)
    assert_same_weights(TinyTask.from_checkpoint(tmp_path), averaged)
    assert_same_weights(TinyTask.from_checkpoint(tmp_path, weights="ema"), averaged)
    assert_same_weights(TinyTask.from_checkpoint(tmp_path, weights="raw"), task)
    latest = tmp_path / "checkpoints" / "latest"
    assert_same_weights(TinyTask.from_checkpoint(latest), task)
    assert_same_weights(TinyTask.from_checkpoint(latest, weights="ema"), averaged)
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        assert '"average": "ema"' in file.metadata()["forge"]


def test_a_run_that_averaged_nothing_exports_the_trained_weights_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task, _ = fit_tiny([EMA(start=100), Checkpoint()], run_dir=tmp_path)
    assert_same_weights(TinyTask.from_checkpoint(tmp_path), task)
    assert "ema.start is 100 updates, but the run has only 10: nothing will be averaged." in caplog.text
    assert (
        "ema averaged nothing in this run: weights.safetensors holds the trained weights. ema.start is 100 updates: "
        "set it earlier, or train longer." in caplog.text
    )
    with pytest.raises(forge.CheckpointError, match="the plugin 'ema' had averaged nothing yet"):
        TinyTask.from_checkpoint(tmp_path, weights="ema")
    assert_same_weights(TinyTask.from_checkpoint(tmp_path, weights="raw"), task)


def test_tied_weights_stay_tied_in_what_is_exported(tmp_path: Path) -> None:
    class Tied(TinyTask):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.second = nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.second(self.first(x)))

    plugin = EMA(0.9)
    task, _ = fit_tiny([plugin, Checkpoint()], task=Tied(), run_dir=tmp_path)
    averaged = applied(plugin, task)
    for source in (tmp_path, tmp_path / "checkpoints" / "latest"):
        loaded = Tied.from_checkpoint(source, weights="ema")
        assert_same_weights(loaded, averaged)
        assert loaded.second.weight is loaded.first.weight


def test_apply_to_gives_the_average_to_any_task_that_fits() -> None:
    plugin = EMA(0.9)
    task, _ = fit_tiny([plugin])
    wide, other = TinyTask(seed=7).double(), nn.Linear(2, 2)
    plugin.apply_to(wide)
    assert_same_weights(
        parameters(wide), {name: tensor.double() for name, tensor in parameters(applied(plugin, task)).items()}
    )
    with pytest.raises(forge.TaskError, match=r"Linear has no net\.0\.weight of the fitted shape"):
        plugin.apply_to(other)


class Marked(Thawing):
    """Has a frozen layer, a buffer that is no float, and one that is not saved."""

    steps: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def training_step(self, batch: Any) -> Any:
        self.steps += 1
        self.scratch += 1
        return super().training_step(batch)


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_apply_to_another_task_gives_it_what_the_run_exports(tmp_path: Path, buffers: Any) -> None:
    plugin, task, fresh = EMA(0.9, buffers=buffers), Marked(), Marked()
    with torch.no_grad():
        task.get_parameter("net.0.weight").add_(5.0)
    fit_tiny([plugin], task=task, run_dir=tmp_path)
    trained = copy.deepcopy(task)
    plugin.apply_to(fresh)
    assert_same_weights(fresh, load_file(tmp_path / "weights.safetensors"))
    assert torch.equal(fresh.scratch, torch.zeros(3))
    assert_same_weights(task, trained)
    plugin.apply_to(task)
    assert_same_weights(task, fresh)


def test_apply_to_a_task_whose_frozen_part_is_another_changes_nothing() -> None:
    class Wider(TinyTask):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))

    plugin, other = EMA(0.9), Wider()
    fit_tiny([plugin], task=Marked())
    before = copy.deepcopy(other)
    with pytest.raises(forge.TaskError, match=r"Wider has no steps of the fitted shape: it is a different task"):
        plugin.apply_to(other)
    assert_same_weights(other, before)


def test_outside_a_fit_nothing_is_swapped_and_the_last_average_is_kept() -> None:
    plugin = EMA(0.9)
    trainer = forge.Trainer(max_epochs=1, plugins=[plugin], run_dir=False, seed=0, device="cpu")
    task, plain = TinyTask(), forge.Trainer(plugins=[], run_dir=False, device="cpu")
    trainer.fit(task, tiny_batches())
    averaged = applied(plugin, task)
    assert trainer.validate(task, tiny_batches(seed=1)) == plain.validate(task, tiny_batches(seed=1))
    assert len(trainer.predict(task, tiny_batches(seed=1))) == 5
    assert_same_weights(applied(plugin, task), averaged)


# -- resumed ----------------------------------------------------------------------------------------------------------


def saved_average(run: Path) -> Any:
    return SavedState.find(run).load()["plugins"]


@pytest.mark.parametrize("cut", [2, 4, 7])
@pytest.mark.parametrize("options", [{}, {"start": 3, "warmup": True, "buffers": "average"}, {"every": 3}])
def test_a_resumed_run_has_the_same_average_bit_for_bit(tmp_path: Path, cut: int, options: dict[str, Any]) -> None:
    def fit(folder: str, updates: int) -> forge.FitResult:
        plugins = [EMA(0.9, **options), Checkpoint()]
        return fit_tiny(plugins, run_dir=tmp_path / folder, max_epochs=None, max_updates=updates, resume="auto")[1]

    straight = fit("straight", 10)
    fit("resumed", cut)
    resumed = fit("resumed", 10)
    ours, theirs = saved_average(tmp_path / "resumed")["ema"], saved_average(tmp_path / "straight")["ema"]
    assert ours["updates"] == theirs["updates"]
    assert_same_weights(ours["weights"], theirs["weights"])
    assert resumed.metrics == straight.metrics
    assert_same_weights(*(load_file(tmp_path / name / "weights.safetensors") for name in ("resumed", "straight")))


def test_a_resumed_run_keeps_the_precision_and_layout_of_the_average(tmp_path: Path) -> None:
    class Images(Half):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    plugin = EMA(0.9)
    for updates in (5, 10):
        fit_tiny([plugin, Checkpoint()], task=Images(), run_dir=tmp_path, max_updates=updates, resume="auto")
    kept = plugin._average.tensors
    assert kept["net.0.weight"].dtype is torch.float32
    assert kept["conv.weight"].is_contiguous(memory_format=torch.channels_last)


def test_a_run_that_goes_on_with_other_buffers_takes_what_there_is(tmp_path: Path) -> None:
    plugin = EMA(0.9)
    for updates, buffers in ((3, "copy"), (6, "average"), (9, "copy")):
        plugin = EMA(0.9, buffers=buffers)
        fit_tiny([plugin, Checkpoint()], run_dir=tmp_path, max_updates=updates, resume="auto")
    assert "net.1.running_mean" not in plugin._average.tensors
    assert plugin._average.count == 9


def test_going_back_to_a_checkpoint_takes_the_average_along(tmp_path: Path) -> None:
    batches = tiny_batches([8] * 8)
    batches[5][0][3, 2] = math.nan
    plugin, expected = EMA(0.9), EMA(0.9)
    saving = Checkpoint(every="2 updates", background=False)
    options = {"max_epochs": 1, "task": TinyTask(dropout=0.0)}
    task, _ = fit_tiny([plugin, Guard("rewind"), saving], train=batches, run_dir=tmp_path, **options)
    options["task"] = TinyTask(dropout=0.0)
    fit_tiny([expected], train=[batch for i, batch in enumerate(batches) if i != 5], **options)
    assert_same_weights(parameters(applied(plugin, task)), parameters(applied(expected, task)))


# -- two averages, and options ----------------------------------------------------------------------------------------


def test_two_that_would_be_evaluated_are_refused_by_name() -> None:
    with pytest.raises(StackError, match="'ema' and 'ema@slow' both provide 'averaged_weights'"):
        fit_tiny(forge.config.build.make_plugins({"ema": {}, "ema@slow": {"decay": 0.9999}}))


def test_a_second_average_is_kept_beside_the_first(tmp_path: Path) -> None:
    plugins = forge.config.build.make_plugins({"ema@slow": {"decay": 0.99, "evaluate": False}, "ema": {"decay": 0.5}})
    task, result = fit_tiny([*plugins, Checkpoint()], run_dir=tmp_path)
    alone, slow = EMA(0.5), EMA(0.99)
    assert fit_tiny([alone])[1].metrics == result.metrics
    fit_tiny([slow])
    assert_same_weights(TinyTask.from_checkpoint(tmp_path), applied(alone, task))
    assert_same_weights(TinyTask.from_checkpoint(tmp_path, weights="ema@slow"), applied(slow, task))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, r"ema\.decay is 1"),
        ({"decay": -0.1}, r"ema\.decay is -0\.1"),
        ({"every": 0}, r"ema\.every is 0"),
        ({"start": -1}, r"ema\.start is -1"),
        ({"start": 1.5}, r"ema\.start is 1\.5.*share of the run"),
        ({"start": "10 min"}, r"ema\.start is '10 min'; write it in updates or epochs"),
        ({"buffers": "none"}, r"buffers"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        EMA(**options)


class Endless:
    """Batches without a length."""

    def __iter__(self) -> Iterable[Any]:
        return iter(tiny_batches() * 3)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (0.5, r"ema\.start is 0\.5 of the run, but the run.s number of updates is unknown.*Set max_updates"),
        ("1 epoch", r"ema\.start is '1 epoch', but the train loader has no length.*Give ema\.start in updates"),
    ],
)
def test_a_start_that_this_run_cannot_tell_is_refused_with_what_to_do(start: Any, message: str) -> None:
    with pytest.raises(forge.ForgeError, match=message):
        fit_tiny([EMA(start=start)], train=Endless(), max_epochs=1)


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"decay": 0.99}, True),
        ({"decay": 0.99, "warmup": True}, False),
        ({"decay": 0.8}, False),
        ({"decay": 0.8, "every": 3}, True),
        ({"decay": 0.8, "start": 7}, True),
        ({"decay": 0.99, "start": 10}, False),
    ],
)
def test_an_average_that_the_run_is_too_short_for_is_told(
    options: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fit_tiny([EMA(**options)])
    assert ("set ema.warmup=true, or a smaller decay" in caplog.text) == warned


@pytest.mark.parametrize(("start", "warned"), [(9, False), (10, True), ("2 epochs", True), (0.9, False)])
def test_a_start_that_the_run_never_reaches_is_told_at_once(
    start: Any, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fit_tiny([EMA(start=start, warmup=True)])
    assert ("nothing will be averaged" in caplog.text) == warned


@pytest.mark.parametrize("options", [{}, {"decay": 0.9, "start": 2, "warmup": True, "every": 2, "buffers": "average"}])
def test_it_keeps_the_contract(options: dict[str, Any]) -> None:
    check_plugin(lambda: EMA(**options))


def test_it_leaves_default_actions_written_out() -> None:
    trainer = forge.Trainer(max_updates=2, plugins=[EMA()], run_dir=False, device="cpu")
    trainer.fit(TinyTask(), tiny_batches())
    assert trainer.hooks.plugged == Plugged(None, None, None, None)


def test_an_average_of_nothing_yet_swaps_nothing() -> None:
    task = TinyTask()
    with Average(task).in_place():
        assert_same_weights(task, TinyTask())


def test_weights_can_be_loaded_by_the_averages_name(tmp_path: Path) -> None:
    plugin, loaded = EMA(0.9), TinyTask(seed=9)
    task, _ = fit_tiny([plugin, Checkpoint(keep=5)], run_dir=tmp_path)
    load_weights(loaded, Checkpoints(tmp_path / "checkpoints").path(10), weights="ema")
    assert_same_weights(loaded, applied(plugin, task))
