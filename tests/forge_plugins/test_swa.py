"""swa alone: which weights it takes, BatchNorm's statistics, its rates. What it shares with ema is in test_averages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR, update_bn
from torch.utils.data import IterableDataset

import forge
from forge.data import Loader
from forge.errors import StackError
from forge.testing import TinyTask, assert_same, first_difference, fit_tiny, tiny_batches
from forge_plugins import SWA, Checkpoint, Schedule
from tests.support.averages import (
    Watched,
    applied,
    by_hand,
    mean_of,
    parameters,
)
from tests.support.profiles import some

STATISTICS = ("net.1.running_mean", "net.1.running_var")


def ends_of_40_samples() -> list[int]:
    """The updates with which 40 more samples are full; an epoch has 37."""
    counts = itertools.accumulate((len(x) for x, _ in tiny_batches() * 4), initial=0)
    return [update for update, (a, b) in enumerate(itertools.pairwise(counts), 1) if b // 40 > a // 40]


# -- the mean ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "taken"),
    some(
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
        quick=2,
    ),
)
def test_the_mean_is_torchs_own_bit_for_bit(options: dict[str, Any], taken: Callable[[int], bool]) -> None:
    plugin = SWA(**options)
    task, _ = fit_tiny([plugin], max_epochs=4)
    assert_same(parameters(applied(plugin, task)), parameters(by_hand(mean_of, taken, epochs=4).module))


# -- what is evaluated ------------------------------------------------------------------------------------------------


def test_validation_and_export_are_of_the_mean_with_update_bn(tmp_path: Path) -> None:
    task, plain = Watched(dropout=0.0), Watched(dropout=0.0)
    fit_tiny([SWA(0.5), Checkpoint()], task=task, max_epochs=4, run_dir=tmp_path)
    fit_tiny([], task=plain, max_epochs=4)
    mean = by_hand(mean_of, lambda update: update in (15, 20), TinyTask(dropout=0.0), epochs=4)
    update_bn(tiny_batches(), mean)
    expected = mean.module.state_dict()
    for name in (*parameters(task), *STATISTICS):
        assert torch.equal(task.seen[-1][name], expected[name]), name
    assert_same(task.seen[1], plain.seen[1])  # before the start
    assert first_difference(task.seen[2], plain.seen[2])
    exported = load_file(tmp_path / "weights.safetensors")
    assert_same(exported, task.seen[-1])
    assert_same(TinyTask.from_checkpoint(tmp_path / "checkpoints" / "latest", weights="swa"), exported)
    assert_same(TinyTask.from_checkpoint(tmp_path, weights="raw"), task)


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
    assert_same(buffers[0], {name: few[name] for name in STATISTICS})
    live: list[dict[str, Tensor]] = []

    class Keeps(Watched):
        def evaluation_end(self, stage: str) -> dict[str, Any]:
            live.append({name: self.state_dict()[name].clone() for name in STATISTICS})
            return {}

    fit_tiny([], task=Keeps(dropout=0.0), max_epochs=4)
    means = {name: live[2][name].lerp(live[3][name], 0.5) for name in STATISTICS}
    assert_same(buffers[1], means)


def fit_statistics(update_bn: bool | int) -> dict[str, Tensor]:
    task = Watched(dropout=0.0)
    fit_tiny([SWA(0.5, update_bn=update_bn)], task=task, max_epochs=4)
    return task.seen[-1]


def count_estimates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    import forge_plugins.averaging.swa as module

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
    assert_same(task, plain)
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


def test_a_plateau_schedule_beside_lr_is_refused() -> None:
    class Plateau(TinyTask):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return optimizer, ReduceLROnPlateau(optimizer)

    with pytest.raises(StackError, match=r"swa\.lr sets the learning rate, and so does the ReduceLROnPlateau"):
        fit_tiny([SWA(lr=0.1)], task=Plateau())
    fit_tiny([SWA()], task=Plateau())


# -- loaders that cannot be read twice at once ------------------------------------------------------------------------


class Counting(IterableDataset[Any]):
    """A stream that knows its place."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 24:
            generator = torch.Generator().manual_seed(self.at)
            self.at += 1
            yield torch.randn(6, generator=generator), self.at % 3
        self.at = 0

    def __len__(self) -> int:
        return 24

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_a_stream_that_keeps_its_place_is_reread_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fit(plugins: list[Any], **options: Any) -> forge.TaskModule:
        return fit_tiny(plugins, train=Loader(Counting(), 8), max_epochs=2, **options)[0]

    plugin = SWA(0)
    assert_same(fit([plugin], run_dir=tmp_path), fit([]))
    assert "keeps its position, which a second pass would move" in caplog.text
    assert plugin._estimated
    estimated, means = load_file(tmp_path / "weights.safetensors"), SWA(0, update_bn=False)
    other = applied(means, fit([means]))
    assert first_difference(estimated, other)
    assert_same({n: estimated[n] for n in parameters(other)}, parameters(other))


class OwnShuffle:
    """A loader with a generator of its own: another order each time it is read."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Any]:
        batches = tiny_batches()
        return iter([batches[i] for i in torch.randperm(len(batches), generator=self.generator).tolist()])

    def __len__(self) -> int:
        return len(tiny_batches())


@pytest.mark.slow
@pytest.mark.parametrize("every", ["2 updates", "1 epoch"])
@pytest.mark.parametrize("allow_inexact", [True, False])
def test_a_loader_that_draws_its_order_is_reread_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: str, allow_inexact: bool
) -> None:
    def fit(plugins: list[Any], **options: Any) -> forge.TaskModule:
        options |= {"validate_every": every, "allow_inexact": allow_inexact}
        return fit_tiny(plugins, train=OwnShuffle(), max_epochs=3, **options)[0]

    plugin = SWA(0, every="2 updates")
    assert_same(fit([plugin], run_dir=tmp_path), fit([]))
    assert caplog.text.count("this loader may give another order on each pass") == 1
    assert plugin._estimated


def test_a_loader_with_nothing_left_leaves_the_mean_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit_tiny([SWA(0, update_bn=2)], train=iter(tiny_batches()), max_epochs=1, run_dir=tmp_path)
    assert "not estimated again" in caplog.text
    assert (tmp_path / "weights.safetensors").exists()
