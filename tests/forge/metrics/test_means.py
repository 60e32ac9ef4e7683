"""Metrics: exact means on the host and, kept unread, on a device; intervals and counters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import forge
from forge.metrics.means import FOLD_AFTER, Means
from forge.progress import Counters, Interval

numbers = st.floats(-100, 100, width=32)


def means(on_host: bool) -> Means:
    """Means as on the CPU, or as on an accelerator (values are kept, not read), which any tensor can play."""
    made = Means(torch.device("cpu"))
    made.on_host = on_host
    return made


@pytest.mark.parametrize("on_host", [True, False])
@given(values=st.lists(st.tuples(numbers, st.integers(1, 9), st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_a_mean_is_weighted_and_takes_numbers_and_tensors(on_host: bool, values: list[Any]) -> None:
    made = means(on_host)
    for value, weight, as_tensor, tensor_weight in values:
        made.add("x", torch.tensor(value) if as_tensor else value, torch.tensor(weight) if tensor_weight else weight)
    expected = sum(v * w for v, w, _, _ in values) / sum(w for _, w, _, _ in values)
    assert made.read().result()["x"] == pytest.approx(expected, rel=1e-4, abs=1e-3)
    assert made.empty
    assert made.read().result() == {}


@pytest.mark.parametrize("on_host", [True, False])
def test_a_weight_of_zero_drops_its_value_and_a_fraction_counts(on_host: bool) -> None:
    made = means(on_host)
    made.add("x", float("nan"), 0)
    made.add("x", 2.0, torch.tensor(0.5))
    assert made.read().result() == {"x": 2.0}


def test_nothing_is_read_before_the_result_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = means(on_host=False)

    def forbidden(*args: Any) -> Any:
        raise AssertionError("a value was read")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu"):
            patch.setattr(torch.Tensor, name, forbidden)
        for i in range(10):
            made.add("loss", torch.ones(()) * i, 2)
            made.add("tokens", torch.ones(()), torch.ones(()) * 3)
        pending = made.read()
    assert not pending.here
    assert pending.result() == {"loss": 4.5, "tokens": 1.0}


def test_kept_values_survive_later_changes_in_place() -> None:
    made, parameter, buffer = means(on_host=False), torch.nn.Parameter(torch.ones(())), torch.ones(())
    made.add("parameter", parameter)
    made.add("view", (parameter * torch.ones(2))[0])
    made.add("buffer", buffer)
    with torch.no_grad():
        parameter.add_(5)
        buffer.add_(5)
    assert made.read().result() == {"parameter": 1.0, "view": 1.0, "buffer": 1.0}


def test_kept_values_hold_no_graph_and_memory_stays_flat() -> None:
    made, weight = means(on_host=False), torch.ones((), requires_grad=True)
    for _ in range(3 * FOLD_AFTER):
        made.add("loss", weight * 2, 1)
        assert len(made._kept["loss"][0]) <= FOLD_AFTER
    assert all(not v.requires_grad for v in made._kept["loss"][0] if isinstance(v, torch.Tensor))
    assert made.read().result()["loss"] == pytest.approx(2.0)


@pytest.mark.parametrize("on_host", [True, False])
def test_a_metric_that_is_no_scalar_is_refused_by_name(on_host: bool) -> None:
    with pytest.raises(forge.TaskError, match=r"metric 'x' has shape \(2,\)"):
        means(on_host).add("x", torch.zeros(2))


def at(update: int = 0, sample: int = 0, samples: int = 0, epoch: int = 0, ends_epoch: bool = False) -> Any:
    trainer = SimpleNamespace(progress=Counters(update=update, sample=sample), agreed_time=None)
    before = {"index": update - 1, "samples_before": sample - samples}
    return SimpleNamespace(trainer=trainer, samples=samples, epoch=epoch, ends_epoch=ends_epoch, **before)


class TestIntervals:
    @pytest.mark.parametrize(
        ("text", "count", "unit"),
        [
            ("500 updates", 500, "update"),
            ("1 epoch", 1, "epoch"),
            ("10000samples", 10000, "sample"),
            ("10 min", 600, "second"),
            ("1.5 h", 5400, "second"),
            ("30 s", 30, "second"),
            ("2 Minutes", 120, "second"),
        ],
    )
    def test_every_unit_is_read(self, text: str, count: float, unit: str) -> None:
        interval = Interval(text)
        assert (interval.count, interval.unit) == (count, unit)
        assert Interval(str(interval)) == interval

    @pytest.mark.parametrize("text", ["", "5", "often", "0 updates", "-1 epoch", "1.5 epochs", "3 weeks", 7])
    def test_anything_else_is_refused_with_examples(self, text: Any) -> None:
        with pytest.raises(forge.ForgeError, match=r"is not an interval.*'500 updates', '1 epoch'"):
            Interval(text)

    def test_updates_and_epochs_are_functions_of_the_counters(self) -> None:
        assert [u for u in range(1, 10) if Interval("3 updates").due(at(update=u))] == [3, 6, 9]
        epochs = [(e, ends) for e in range(4) for ends in (False, True)]
        assert [e for e in epochs if Interval("2 epochs").due(at(epoch=e[0], ends_epoch=e[1]))] == [
            (1, True),
            (3, True),
        ]

    @given(sizes=st.lists(st.integers(1, 7), max_size=30), every=st.integers(1, 10))
    def test_samples_are_due_whenever_a_multiple_is_crossed(self, sizes: list[int], every: int) -> None:
        interval, total, due = Interval(f"{every} samples"), 0, 0
        for size in sizes:
            total += size
            crossed = total // every > (total - size) // every
            assert interval.due(at(sample=total, samples=size)) == crossed
            due += crossed
        assert due <= total // every

    def test_a_clock_is_due_once_and_answers_once_per_update(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr("time.monotonic", lambda: now[0])
        interval = Interval("10 s")

        def answers() -> list[bool]:
            step, given = at(), []
            for step.index, now[0] in enumerate([0.0, 5.0, 11.0, 12.0, 22.0]):
                given.append(interval.due(step))
                assert interval.due(step) == given[-1]
            return given

        assert answers() == [False, False, True, False, True]
        assert answers() == [False, False, True, False, True]  # another run starts afresh


class TestHistogram:
    def test_it_counts_like_numpy(self) -> None:
        values = torch.randn(500, generator=torch.Generator().manual_seed(0)).double()
        histogram = forge.Histogram.of(values, bins=16)
        counts, edges = numpy.histogram(values.float().numpy(), bins=16)
        assert histogram.counts.sum() == 500
        assert (histogram.counts.numpy() - counts).__abs__().max() <= 1  # a value on an edge may fall either way
        numpy.testing.assert_allclose(histogram.edges.numpy(), edges, rtol=1e-5)

    @pytest.mark.parametrize("values", [[], [2.0], [3.0, 3.0], [float("nan")], [float("inf"), 1.0, 2.0]])
    def test_odd_values_neither_raise_nor_count(self, values: list[float]) -> None:
        histogram = forge.Histogram.of(torch.tensor(values), bins=4)
        assert histogram.counts.sum() == sum(numpy.isfinite(values))
        assert torch.isfinite(histogram.edges).all()
        assert (histogram.edges.diff() > 0).all()
