"""swa alone: which weights it takes, BatchNorm's statistics, its rates. What it shares with ema is in test_averages."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR, update_bn

import forge
from forge.data import Loader
from forge.errors import StackError
from forge.testing import TinyGAN, TinyTask, assert_same_weights, first_difference, fit_tiny, tiny_batches
from forge_plugins import SWA, Checkpoint, Schedule
from tests.support.averages import (
    Watched,
    applied,
    by_hand,
    loss_of,
    mean_of,
    parameters,
    skipping,
    train,
)
from tests.support.swa_kit import Noisy

STATISTICS = ("net.1.running_mean", "net.1.running_var")


def ends_of_40_samples() -> list[int]:
    """The updates with which 40 more samples are full; an epoch has 37."""
    counts = itertools.accumulate((len(x) for x, _ in tiny_batches() * 4), initial=0)
    return [update for update, (a, b) in enumerate(itertools.pairwise(counts), 1) if b // 40 > a // 40]


# -- the mean ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, lambda update: update == 20),
        ({"start": 0.5}, lambda update: update in (15, 20)),
        ({"start": 0.0}, lambda update: update % 5 == 0),
        ({"start": "2 epochs"}, lambda update: update in (15, 20)),
        ({"start": 9, "every": "1 epoch"}, lambda update: update in (10, 15, 20)),
        ({"start": 4, "every": "3 updates"}, lambda update: update in (6, 9, 12, 15, 18)),
        ({"start": 0.7, "every": "1 updates"}, lambda update: update > 14),
        ({"start": 0, "every": "40 samples"}, lambda update: update in ends_of_40_samples()),
    ],
)
def test_the_mean_is_torchs_own_bit_for_bit(options: dict[str, Any], taken: Callable[[int], bool]) -> None:
    plugin = SWA(**options)
    task, _ = fit_tiny([plugin], max_epochs=4)
    assert_same_weights(parameters(applied(plugin, task)), parameters(by_hand(mean_of, taken, epochs=4).module))


def test_the_mean_is_the_mean() -> None:
    plugin = SWA(0, every="1 updates")
    task, _ = fit_tiny([plugin], max_epochs=4)
    seen: list[list[Tensor]] = []
    model = TinyTask()
    train(model, lambda update: seen.append([p.detach().double() for p in model.parameters()]), epochs=4)
    for ours, *theirs in zip(applied(plugin, task).parameters(), *seen, strict=True):
        torch.testing.assert_close(ours.double(), torch.stack(theirs).mean(0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("skipped", "taken"),
    [
        ({4}, [4, 9, 14]),  # an epoch whose last update is skipped ends all the same
        ({5, 6, 7, 8, 9}, [4, 14]),  # an epoch without an update has nothing new
    ],
)
def test_the_same_weights_are_taken_once(skipped: set[int], taken: list[int]) -> None:
    plugin = SWA(0)
    task, _ = fit_tiny([plugin, skipping(*skipped)], task=TinyTask(dropout=0.0), max_epochs=3)
    model = TinyTask(dropout=0.0)
    mean = mean_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for update, batch in enumerate(tiny_batches() * 3):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if update not in skipped:
            optimizer.step()
        if update in taken:
            mean.update_parameters(model)
    assert_same_weights(parameters(applied(plugin, task)), parameters(mean.module))


# -- what is evaluated ------------------------------------------------------------------------------------------------


def evaluated(model: nn.Module) -> float:
    model.eval()
    batches, total = tiny_batches(seed=1), 0.0
    with torch.inference_mode():
        for batch in batches:
            total += loss_of(model, batch).item() * len(batch[0])
    return total / sum(len(x) for x, _ in batches)


def test_validation_and_export_are_of_the_mean_with_update_bn(tmp_path: Path) -> None:
    task, plain = Watched(dropout=0.0), Watched(dropout=0.0)
    _, result = fit_tiny([SWA(0.5), Checkpoint()], task=task, max_epochs=4, run_dir=tmp_path)
    fit_tiny([], task=plain, max_epochs=4)
    mean = by_hand(mean_of, lambda update: update in (15, 20), TinyTask(dropout=0.0), epochs=4)
    update_bn(tiny_batches(), mean)
    expected = mean.module.state_dict()
    for name in (*parameters(task), *STATISTICS):
        assert torch.equal(task.seen[-1][name], expected[name]), name
    assert result.metrics["val/loss"] == evaluated(mean.module)
    assert_same_weights(task.seen[1], plain.seen[1])  # before the start
    assert first_difference(task.seen[2], plain.seen[2])
    exported = load_file(tmp_path / "weights.safetensors")
    assert_same_weights(exported, task.seen[-1])
    assert_same_weights(TinyTask.from_checkpoint(tmp_path / "checkpoints" / "latest", weights="swa"), exported)
    assert_same_weights(TinyTask.from_checkpoint(tmp_path, weights="raw"), task)


def test_without_validation_the_export_has_its_statistics(tmp_path: Path) -> None:
    task = TinyTask(dropout=0.0)
    trainer = forge.Trainer(max_epochs=4, plugins=[SWA(0.5)], run_dir=tmp_path, seed=0, device="cpu")
    trainer.fit(task, tiny_batches())
    mean = by_hand(mean_of, lambda update: update in (15, 20), TinyTask(dropout=0.0), epochs=4)
    update_bn(tiny_batches(), mean)
    exported = load_file(tmp_path / "weights.safetensors")
    for name in STATISTICS:
        assert torch.equal(exported[name], mean.module.state_dict()[name])


def test_update_bn_can_take_only_some_batches_or_none(tmp_path: Path) -> None:
    mean = by_hand(mean_of, lambda update: update in (15, 20), TinyTask(dropout=0.0), epochs=4)
    buffers = [
        {name: tensor for name, tensor in fit_statistics(update_bn).items() if name in STATISTICS}
        for update_bn in (2, False)
    ]
    update_bn(tiny_batches()[:2], mean)
    few = mean.module.state_dict()
    assert_same_weights(buffers[0], {name: few[name] for name in STATISTICS})
    live: list[dict[str, Tensor]] = []

    class Keeps(Watched):
        def evaluation_end(self, stage: str) -> dict[str, Any]:
            live.append({name: self.state_dict()[name].clone() for name in STATISTICS})
            return {}

    fit_tiny([], task=Keeps(dropout=0.0), max_epochs=4)
    means = {name: live[2][name].lerp(live[3][name], 0.5) for name in STATISTICS}
    assert_same_weights(buffers[1], means)


def fit_statistics(update_bn: bool | int) -> dict[str, Tensor]:
    task = Watched(dropout=0.0)
    fit_tiny([SWA(0.5, update_bn=update_bn)], task=task, max_epochs=4)
    return task.seen[-1]


class Drawing(TinyTask):
    """Draws in its steps, and keeps buffers of every kind that its training step moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("centre", torch.zeros(6))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def training_step(self, batch: Any) -> Any:
        self.steps += 1
        self.scratch.add_(1)
        self.centre = self.centre * 0.9 + batch[0].mean(0) * 0.1
        return super().training_step((batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]))

    validation_step = TinyTask.training_step


class CountsForwards(forge.Plugin):
    """Records something at every forward of a training step."""

    @forge.hookimpl(wrapper=True)
    def forge_forward(self, step: forge.Step, batch: Any) -> Any:
        output = yield
        if step.stage == "train":
            step.record("forwards", batch[0].sum())
        return output


@pytest.mark.parametrize(
    ("workers", "every"),
    [
        (0, "3 updates"),
        (0, "1 epoch"),
        *(pytest.param(1, every, marks=pytest.mark.slow) for every in ("3 updates", "1 epoch")),
    ],
)
def test_the_run_does_not_notice_the_estimate(workers: int, every: str) -> None:
    """Data order, augmentation, random numbers, modes, buffers and metrics of training, in the middle of an epoch."""

    def fit(plugins: list[Any]) -> tuple[Any, dict[str, float], list[Any]]:
        options = {"persistent_workers": False, "multiprocessing_context": "fork"} if workers else {}
        loader = Loader(Noisy(), 8, shuffle=True, num_workers=workers, **options)
        losses: list[Any] = []

        @forge.on("log")
        def keep(update: int, metrics: dict[str, Any]) -> None:
            losses.append((update, metrics.get("train/loss"), metrics.get("forwards")))

        stack = [*plugins, keep, CountsForwards()]
        task, result = fit_tiny(stack, task=Drawing(), train=loader, max_epochs=3, validate_every=every)
        return task, {k: v for k, v in result.metrics.items() if k.startswith("train/")}, losses

    estimated = SWA(3, every="2 updates")
    plain, watched = fit([]), fit([estimated])
    assert estimated._estimated
    assert_same_weights(watched[0], plain[0])
    assert torch.equal(watched[0].scratch, plain[0].scratch)
    assert watched[1:] == plain[1:]
    assert all(module.training for module in watched[0].modules())
    assert watched[0].net[1].momentum == 0.1


def test_one_average_is_estimated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_estimates(monkeypatch)
    fit_tiny([SWA(0.5)], max_epochs=4, validate_every="1 updates", run_dir=None)
    assert calls == [1, 2]


def count_estimates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    import forge_plugins.swa as module

    calls: list[int] = []
    estimate = module.estimate

    def counted(*words: Any) -> Any:
        calls.append(len(calls) + 1)
        return estimate(*words)

    monkeypatch.setattr(module, "estimate", counted)
    return calls


def test_without_batch_normalisation_the_data_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(TinyTask):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    calls = count_estimates(monkeypatch)
    fit_tiny([SWA(0)], task=Plain())
    assert calls == []


def test_a_frozen_batch_norm_keeps_its_statistics() -> None:
    class Frozen(Watched):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.norm.running_mean = torch.linspace(0, 1, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.norm(x))

    @forge.on("build_model", mutates=True)
    def freeze(build: Any, phase: str) -> None:
        if phase == "surgery":
            build.task.norm.eval()

    task = Frozen()
    fit_tiny([SWA(0), freeze], task=task)
    assert torch.equal(task.seen[-1]["norm.running_mean"], torch.linspace(0, 1, 6))
    assert not torch.equal(task.seen[-1]["net.1.running_mean"], task.state_dict()["net.1.running_mean"])


class Unsaved(TinyTask):
    """Leaves BatchNorm's statistics out of what is saved; remembers those that each validation used."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.seen: list[dict[str, Tensor]] = []

    def state_dict(self, *words: Any, **options: Any) -> Any:
        state = super().state_dict(*words, **options)
        return {name: tensor for name, tensor in state.items() if not name.startswith("net.1.")}

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        self.seen.append({name: tensor.clone() for name, tensor in self.named_buffers()})
        return {}


def test_unsaved_statistics_are_estimated_and_put_back(tmp_path: Path) -> None:
    task, plain, saved = Unsaved(), TinyTask(dropout=0.0), Watched(dropout=0.0)
    fit_tiny([SWA(0)], task=task, validate_every="3 updates", run_dir=tmp_path)
    fit_tiny([], task=plain)
    fit_tiny([SWA(0)], task=saved, validate_every="3 updates")
    assert_same_weights(dict(task.named_buffers()), dict(plain.named_buffers()))
    assert_same_weights(parameters(task), parameters(plain))
    assert len(task.seen) == len(saved.seen) > 2
    for ours, theirs in zip(task.seen[1:], saved.seen[1:], strict=True):  # at update 3 there is no average
        for name in STATISTICS:
            assert torch.equal(ours[name], theirs[name])
    assert not [name for name in load_file(tmp_path / "weights.safetensors") if "running" in name]


class Replacing(TinyTask):
    """Puts other tensors in the place of its buffers at every forward of an evaluation."""

    level: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(1))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.level, self.calls = self.level + 1, self.calls + 1
        return super().forward(x)


def test_buffers_that_an_evaluation_replaces_are_put_back(tmp_path: Path) -> None:
    task, plain, plugin = Replacing(), Replacing(), SWA(7, every="1 updates")
    fit_tiny([plugin], task=task, validate_every="2 updates", run_dir=tmp_path)
    fit_tiny([], task=plain, validate_every="2 updates")
    assert_same_weights(parameters(task), parameters(plain))
    assert torch.equal(task.calls, plain.calls)
    assert plugin._estimated


def test_a_step_that_asks_for_gradients_is_estimated_too() -> None:
    class Penalty(Watched):
        def training_step(self, batch: Any) -> Any:
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
            return {"loss": loss_of(self, batch) + 0.01 * slope.square().mean()}

        validation_step = TinyTask.validation_step

    task = Penalty()
    fit_tiny([SWA(0)], task=task)
    assert len(task.seen) == 2
    assert all(parameter.grad is None for parameter in task.parameters())


@pytest.mark.parametrize("where", ["training_step", "validation_step", "loader"])
def test_an_error_leaves_everything_as_training_had_it(where: str) -> None:
    class Breaks(TinyTask):
        ready = False

        def training_step(self, batch: Any) -> Any:
            if self.ready and where == "training_step":
                raise ZeroDivisionError
            return super().training_step(batch)

        def validation_step(self, batch: Any) -> Any:
            if where == "validation_step":
                raise ZeroDivisionError
            return super().training_step(batch)

    class Batches(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            if Breaks.ready and where == "loader":
                raise ZeroDivisionError
            return super().__iter__()

    @forge.on("step_end")
    def arm(step: forge.Step) -> None:
        Breaks.ready = step.ends_epoch

    task, plain = Breaks(), TinyTask()
    with pytest.raises(ZeroDivisionError):
        fit_tiny([SWA(0), arm], task=task, train=Batches(tiny_batches()))
    fit_tiny([], task=plain, max_epochs=1)
    assert_same_weights(task, plain)
    assert task.net[1].momentum == 0.1


# -- the learning rate ------------------------------------------------------------------------------------------------


class Rates:
    """What every update used, one number a group."""

    def __init__(self) -> None:
        self.used: list[list[float]] = []

        @forge.on("step_end")
        def keep_rates(step: forge.Step) -> None:
            groups = [g for name in step.trainer.optimizers for g in step.trainer.optimizers[name].param_groups]
            self.used.append([float(group["lr"]) for group in groups])

        self.plugin = keep_rates


@pytest.mark.parametrize("anneal", [0, 4, "1 epoch", 0.5])
def test_the_rate_goes_as_torchs_swalr_takes_it(anneal: Any) -> None:
    class Two(TinyTask):
        def configure_optimizers(self) -> Any:
            first, *rest = self.parameters()
            return torch.optim.SGD([{"params": [first], "lr": 0.3}, {"params": rest}], lr=0.1)

    rates, task = Rates(), Two()
    fit_tiny([SWA("1 epoch", lr=0.05, anneal=anneal), rates.plugin], task=task)
    optimizer = Two().configure_optimizers()
    expected, length = [[0.3, 0.1]] * 5, {0: 0, 4: 4}.get(anneal, 5)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=length)
    for _ in range(5):
        expected.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert rates.used == [pytest.approx(pair, rel=1e-12) for pair in expected]


@pytest.mark.parametrize("swa_first", [True, False])
def test_until_the_start_the_schedule_decides_then_swa(swa_first: bool) -> None:
    alone, both = Rates(), Rates()
    fit_tiny([Schedule("cosine"), alone.plugin])
    stack = [SWA(0.6, lr=0.07, anneal=0), Schedule("cosine")]
    fit_tiny([*(stack if swa_first else stack[::-1]), both.plugin])
    assert both.used == [*alone.used[:6], *[[0.07]] * 4]


def test_a_schedule_of_the_tasks_is_taken_over_at_the_start() -> None:
    class Cosine(TinyTask):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return optimizer, CosineAnnealingLR(optimizer, 10)

    alone, both = Rates(), Rates()
    fit_tiny([alone.plugin], task=Cosine())
    fit_tiny([SWA(0.6, lr=0.07, anneal=2), both.plugin], task=Cosine())
    before = alone.used[6][0]
    assert both.used[:7] == alone.used[:7]
    assert both.used[7:] == [[pytest.approx((before + 0.07) / 2)], [0.07], [0.07]]


def test_from_the_first_update_on() -> None:
    rates = Rates()
    fit_tiny([SWA(0, lr=0.01, anneal=0), rates.plugin], task=TinyGAN())
    assert rates.used == [[0.01, 0.01]] * 10


def test_without_lr_the_rates_are_the_schedules() -> None:
    alone, both = Rates(), Rates()
    fit_tiny([Schedule("linear"), alone.plugin])
    fit_tiny([SWA(0.2), Schedule("linear"), both.plugin])
    assert both.used == alone.used


def test_a_rate_on_the_device_is_changed_where_it_is() -> None:
    class OnTensor(TinyTask):
        def configure_optimizers(self) -> Any:
            self.rate = torch.tensor(0.1)
            return torch.optim.SGD(self.parameters(), lr=self.rate)

    rates, task = Rates(), OnTensor()
    fit_tiny([SWA(0.5, lr=0.02, anneal=0), rates.plugin], task=task)
    assert task.rate.item() == pytest.approx(0.02)
    assert [pair[0] for pair in rates.used] == pytest.approx([0.1] * 5 + [0.02] * 5)


def test_a_plateau_schedule_beside_lr_is_refused() -> None:
    class Plateau(TinyTask):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return optimizer, ReduceLROnPlateau(optimizer)

    with pytest.raises(StackError, match=r"swa\.lr sets the learning rate, and so does the ReduceLROnPlateau"):
        fit_tiny([SWA(lr=0.1)], task=Plateau())
    fit_tiny([SWA()], task=Plateau())


# -- resumed, and beside others ---------------------------------------------------------------------------------------


def test_the_log_names_the_cost_of_a_slow_estimate(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "forge")
    ticks = iter(range(0, 10_000, 5))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    fit_tiny([SWA(0)], max_epochs=1)
    assert "swa: BatchNorm's statistics estimated from 5 batches in 5.0 s" in caplog.text
