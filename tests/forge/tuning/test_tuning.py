"""forge.tuning: the range test finds the rates that work, and the search finds the largest batch, exactly."""

from __future__ import annotations

import gc
import itertools
import math
import mmap
import sys
import weakref
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

import forge
from forge.data import Loader, TensorLoader
from forge.testing import TinyGAN, TinyTask, tiny_batches
from forge.tuning import BatchReport, LRCurve, Probe, batch_range, draw_lr, lr_range
from forge.tuning import batch as searching
from forge.tuning.batch import largest_that
from forge.tuning.lr import rate_text, smooth
from forge.util import peak_memory
from forge_plugins import Accumulate, Clip
from tests.support.profiles import some

clean = peak_memory.clean


class Bowl(forge.TaskModule):
    """A quadratic whose gradient descent contracts below a rate of 2 / curvature, and diverges above."""

    def __init__(self, curvature: float = 1.0, lr: float = 0.1):
        super().__init__()
        self.curvature, self.lr = curvature, lr
        self.weight = nn.Parameter(torch.full((4,), 3.0))

    def training_step(self, batch: Any) -> Any:
        return self.curvature / 2 * (self.weight - batch.mean(0)).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Breaks(Bowl):
    """Gives no number any more above a rate of 1e-3."""

    def training_step(self, batch: Any) -> Any:
        rate = self.trainer.optimizers[None].param_groups[0]["lr"]  # pyright: ignore[reportOptionalMemberAccess]
        return super().training_step(batch) * (math.nan if rate > 1e-3 else 1)


def noise(count: int = 5) -> list[torch.Tensor]:
    """Where the bowl's lowest point is, as far as each batch can tell."""
    return [*torch.randn(count, 4, 4, generator=torch.Generator().manual_seed(0)) * 0.2]


@pytest.fixture(autouse=True)
def short_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody here looks at speeds, so no update is repeated to measure them; nor at what a trial leaves for later."""
    monkeypatch.setattr(searching, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(peak_memory, "clean", lambda: None)


# -- the range test ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", [0.5, 1.0, 7.0, 100.0, 3000.0])
def test_the_suggestion_is_well_below_the_divergent_rate(curvature: float) -> None:
    curve = lr_range(lambda: Bowl(curvature), noise(), highest=100.0)
    assert curve.diverged is not None
    assert curve.diverged > 2 / curvature
    assert 0.01 / curvature < curve.suggestion < 1 / curvature
    assert curve.valley < 1 / curvature
    assert curve.steepest < 1 / curvature
    assert curve.fell


def test_its_losses_are_those_of_a_plain_loop() -> None:
    curve = lr_range(TinyTask, tiny_batches(), lowest=1e-4, highest=1e-1, updates=12, seed=0)
    torch.manual_seed(0)
    task, losses = TinyTask(), []
    optimizer = torch.optim.SGD(task.parameters(), lr=1.0, momentum=0.9)
    torch.manual_seed(0)
    for batch, rate in zip(itertools.cycle(tiny_batches()), curve.rates, strict=False):
        optimizer.param_groups[0]["lr"] = rate
        loss = task.training_step(batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert curve.losses == losses
    assert curve.rates[0] == 1e-4
    assert curve.rates[-1] == pytest.approx(1e-1)
    assert len(curve.rates) == 12
    ratios = {round(b / a, 9) for a, b in itertools.pairwise(curve.rates)}
    assert len(ratios) == 1
    assert curve.reference == 0.1


def rates_used(task: type[forge.TaskModule], **options: Any) -> list[dict[str, list[float]]]:
    """By optimizer, the rate of each group at every update of a test."""
    seen = []

    @forge.on("edit_grads")
    def watch(step: forge.Step) -> None:
        seen.append({str(step.name): [float(group["lr"]) for group in step.optimizer.param_groups]})

    watch.observer = False  # those are left out
    lr_range(task, tiny_batches(), lowest=1e-3, highest=1e-2, updates=10, plugins=[watch], **options)
    return seen


class TwoGroups(TinyTask):
    def configure_optimizers(self) -> Any:
        first, *_, last = self.net.children()
        return torch.optim.SGD([{"params": first.parameters()}, {"params": last.parameters(), "lr": 1.0}], lr=0.25)


def test_parameter_groups_keep_their_ratio() -> None:
    seen = rates_used(TwoGroups)
    assert seen[0]["None"] == pytest.approx([1e-3, 4e-3])
    assert seen[-1]["None"] == pytest.approx([1e-2, 4e-2])


def test_several_optimizers_are_scaled_together() -> None:
    class Uneven(TinyGAN):
        def configure_optimizers(self) -> Any:
            both = super().configure_optimizers()
            both["discriminator"].param_groups[0]["lr"] *= 2
            return both

    seen = rates_used(Uneven)
    assert [*seen[-2].values(), *seen[-1].values()] == [pytest.approx([1e-2]), pytest.approx([2e-2])]


def test_one_of_several_is_tested_alone_with_its_own_loss() -> None:
    seen = rates_used(TinyGAN, optimizer="discriminator")
    assert [*seen[-2].values(), *seen[-1].values()] == [[0.05], pytest.approx([1e-2])]
    alone = lr_range(TinyGAN, tiny_batches(), updates=10, optimizer="discriminator", seed=0)
    both = lr_range(TinyGAN, tiny_batches(), updates=10, seed=0)
    assert alone.losses[0] != both.losses[0]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: LambdaLR(o, lambda i: 0.01 * i),
        lambda o: OneCycleLR(o, 0.1, 100, cycle_momentum=False),
        lambda o: ReduceLROnPlateau(o),
    ],
)
def test_schedules_of_the_task_are_left_out(schedule: Any) -> None:
    class Scheduled(Bowl):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return optimizer, schedule(optimizer)

    curve, plain = lr_range(Scheduled, noise(), updates=40), lr_range(Bowl, noise(), updates=40)
    assert curve.rates == plain.rates
    assert curve.losses == pytest.approx(plain.losses)


def test_the_default_stack_runs_and_writes_nothing(
    capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    extra = {name: {} for name in ("schedule", "early_stop", "anomaly", "accumulate")}
    curve = lr_range(Breaks, noise(), recipe="default", plugins=extra)
    assert curve.diverged == pytest.approx(1e-3, rel=0.3)  # guard and anomaly would have stopped it with an error
    assert not list(Path.cwd().iterdir())
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def test_what_changes_training_stays_in_the_stack() -> None:
    long = lr_range(lambda: Bowl(), noise(), plugins=[Clip(1e-3)])
    assert long.diverged is None
    windows = []

    @forge.on("step_end", mutates=True)
    def watch(step: forge.Step) -> None:
        windows.append(len(step.window))

    lr_range(Bowl, noise(4), plugins=[Accumulate(2), watch], updates=10)
    assert {*windows} == {2}


def test_the_test_ends_soon_after_the_loss_runs_away() -> None:
    updates = []

    @forge.on("step_end", mutates=True)
    def count(step: forge.Step) -> None:
        updates.append(step.index)

    curve = lr_range(lambda: Bowl(100.0), noise(), plugins=[count])
    assert len(curve.rates) == len(curve.losses) == len(curve.smoothed) == len(updates) < 90
    assert curve.diverged is not None
    assert 0.02 < curve.diverged < 0.2


def test_a_loss_that_is_not_finite_ends_it() -> None:
    curve = lr_range(Breaks, noise())
    assert curve.diverged == pytest.approx(1e-3, rel=0.3)
    assert all(map(math.isfinite, curve.losses))
    with pytest.raises(forge.ForgeError, match=r"not finite at the lowest rate, 0\.01, so the learning rate"):
        lr_range(Breaks, noise(), lowest=0.01)


@pytest.mark.parametrize("options", [{"lowest": 0.0}, {"lowest": 2.0, "highest": 1.0}, {"updates": 5}])
def test_a_range_that_is_none_is_refused(options: Any) -> None:
    with pytest.raises(forge.ForgeError, match=r"is empty|too few"):
        lr_range(Bowl, noise(), **options)


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_fall(seed: int) -> None:
    drawn = torch.randn(100, generator=torch.Generator().manual_seed(seed))
    flat, falling = (5 + drawn).tolist(), (5 + drawn - torch.linspace(-10, 10, 100).clamp(min=0)).tolist()
    rates = [1e-6 * 1.1**i for i in range(100)]
    assert not LRCurve(rates, flat, smooth(flat, 0.83), 1.0).fell
    assert LRCurve(rates, falling, smooth(falling, 0.83), 1.0).fell


def test_a_loss_that_hardly_falls_suggests_nothing() -> None:
    class Flat(Bowl):
        def training_step(self, batch: Any) -> Any:
            return 1 + 1e-6 * self.weight.sum()

    assert not lr_range(Flat, noise(), updates=20).fell


# -- its picture ------------------------------------------------------------------------------------------------------


def test_the_picture_shows_curve_and_suggestion(tmp_path: Path) -> None:
    curve = lr_range(lambda: Bowl(100.0), noise())
    path = draw_lr(curve, "A bowl", tmp_path / "new" / "lr.svg")
    drawn = ElementTree.parse(path).getroot()
    named = {
        each.get("data-name"): str(each.get("data-points")).split() for each in drawn.iter() if each.get("data-name")
    }
    marks = ["valley", "steepest", "minimum", f"suggestion {rate_text(curve.suggestion)}"]
    assert list(named) == ["loss of each update", "smoothed", *marks]
    assert len(named["smoothed"]) == len(curve.rates)
    assert [float(named[mark][0].partition(",")[0]) for mark in marks] == [
        curve.valley,
        curve.steepest,
        curve.minimum,
        curve.suggestion,
    ]


# -- the largest batch ------------------------------------------------------------------------------------------------


@given(st.integers(0, 5000), st.integers(1, 4000), st.integers(1, 4096))
def test_the_search_finds_the_largest_that_works(limit: int, start: int, highest: int) -> None:
    asked: list[int] = []

    def works(size: int) -> bool:
        asked.append(size)
        return size <= limit

    assert largest_that(works, start, highest, exact=True) == min(limit, highest)
    assert len({*asked}) <= 2 * highest.bit_length() + 2
    asked.clear()
    power = largest_that(works, start, highest)
    assert power == max((2**i for i in range(13) if 2**i <= min(limit, highest)), default=0)
    assert all(1 <= size <= highest and size.bit_count() == 1 for size in asked)


class Eats(TinyTask):
    """Runs out of memory above a size, as far as anybody can tell."""

    limit = 37
    made: list[Any] = []

    def __init__(self) -> None:
        super().__init__()
        self.made.append(weakref.ref(self))

    def training_step(self, batch: Any) -> Any:
        if len(batch[0]) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().training_step(batch)


def loader(samples: int = 400) -> Any:
    (x, y), *_ = tiny_batches([samples])
    return lambda size: TensorLoader(x, y, batch_size=size)


@pytest.mark.parametrize("limit", some([2, 31, 100], quick=1))
def test_the_largest_batch_that_fits_is_found_exactly(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Eats, "limit", limit)
    report = batch_range(Eats, loader(), exact=True, highest=128, updates=3, device="cpu")
    assert report.largest == limit
    assert report.too_large is not None
    assert (report.too_large.size, report.too_large.why_not) == (limit + 1, "out of memory")
    assert [probe.size for probe in report.probes] == sorted({probe.size for probe in report.probes})
    rounded = batch_range(Eats, loader(), highest=128, updates=3)
    assert rounded.largest == 1 << (limit.bit_length() - 1)


def test_every_size_gets_a_task_of_its_own() -> None:
    Eats.made.clear()
    report = batch_range(Eats, loader(), updates=3)
    assert [probe.size for probe in report.probes] == [32, 64]
    assert len(Eats.made) == 2
    gc.collect()
    assert [made() for made in Eats.made] == [None, None]


def test_a_start_that_is_too_large_is_halved() -> None:
    told = []
    report = batch_range(Eats, loader(), start=300, updates=3, tell=told.append)
    assert [probe.size for probe in told] == [256, 128, 64, 32]
    assert report.largest == 32


def test_when_nothing_fits_that_is_said() -> None:
    class Task(Eats):
        limit = 0

    with pytest.raises(forge.ForgeError, match="Not even a batch of 1 fits: out of memory"):
        batch_range(Task, loader(), updates=3)


def test_an_error_of_another_kind_at_the_first_size_is_the_users() -> None:
    class Wrong(TinyTask):
        def training_step(self, batch: Any) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        batch_range(Wrong, loader(), updates=3)


def test_another_error_at_a_larger_size_ends_the_search() -> None:
    class Wrong(TinyTask):
        def training_step(self, batch: Any) -> Any:
            if len(batch[0]) > 100:
                raise RuntimeError("index is too large for 32 bits\nmore")
            return super().training_step(batch)

    report = batch_range(Wrong, loader(), updates=3)
    assert report.largest == 64
    assert report.too_large is not None
    assert report.too_large.why_not == "RuntimeError: index is too large for 32 bits"


def test_a_loader_that_drops_short_batches_ends_it_too() -> None:
    (x, y), *_ = tiny_batches([100])
    data = torch.utils.data.TensorDataset(x, y)
    report = batch_range(TinyTask, lambda size: Loader(data, size, drop_last=True), updates=3)
    assert report.largest == 64


def test_a_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Notes(TinyTask):
        def __init__(self) -> None:
            super().__init__()
            sizes.clear()

        def training_step(self, batch: Any) -> Any:
            sizes.append(len(batch[0]))
            return super().training_step(batch)

    monkeypatch.setattr(peak_memory, "peak", lambda device: max(sizes) * 10**8)
    report = batch_range(Notes, loader(), limit=10, updates=3, exact=True)
    assert report.largest == 100
    assert report.too_large is not None
    assert report.too_large.why_not == "over the limit of 10 GB"


@pytest.mark.parametrize("options", [{"start": 0}, {"highest": 0}, {"updates": 2}])
def test_what_makes_no_sense_is_refused(options: Any) -> None:
    with pytest.raises(forge.ForgeError, match="it must be at least"):
        batch_range(TinyTask, loader(), **options)


def report(*speeds: float, extra: Any = ()) -> BatchReport:
    probes = [Probe(2**i, speed=speed) for i, speed in enumerate(speeds)]
    return BatchReport(sorted([*probes, *extra], key=lambda probe: probe.size))


def test_the_smallest_size_nearly_the_fastest_is_recommended() -> None:
    assert report(100, 200, 390, 400, 395).recommended == 4
    assert report(100, 200, 400).recommended == 4
    assert report(100).recommended == 1


def test_sizes_that_do_not_fit_or_are_odd_are_not_recommended() -> None:
    odd, failed = Probe(5, speed=1000), Probe(8, "out of memory", speed=2000)
    found = report(100, 200, 300, extra=[odd, failed])
    assert (found.recommended, found.fastest.size, found.largest) == (4, 4, 5)
    assert found.too_large == failed


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process can be reset on Linux only")
def test_the_peak_is_measured_from_the_start_asked_for() -> None:
    device = torch.device("cpu")
    clean()
    peak_memory.start(device)
    before = peak_memory.peak(device)
    block = mmap.mmap(-1, 200_000_000)  # not a tensor: torch's allocator may keep what is freed (mimalloc on ARM)
    block.write(bytes(200_000_000))
    assert before is not None
    grown = (peak_memory.peak(device) or 0) - before
    assert 150e6 < grown < 400e6
    block.close()
    clean()
    peak_memory.start(device)
    assert (peak_memory.peak(device) or 0) < before + 100e6
