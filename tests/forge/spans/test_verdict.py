"""The verdict on a run's speed: its kind follows from the numbers, and its words say what helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.spans.verdict import LOST, Measured, divided, verdict


def on_cpu(calls: float | None = 100, **values: Any) -> Measured:
    """An update of one second of phases, of which 100 operators take 1 ms to call."""
    names = ("data", "to_device", "forward", "backward", "optimizer", "evaluate", "checkpoint", "log", "wait")
    phases = {name: values.pop(name, 0.0) for name in names}
    phases["forward"] = phases["forward"] or 1.0 - sum(phases.values())
    return Measured(phases=phases, calls=calls, updates=values.pop("updates", 100), **values)


def on_gpu(busy: float, **values: Any) -> Measured:
    return on_cpu(on_cpu=False, busy=busy, **values)


@pytest.mark.parametrize(
    ("measured", "kind"),
    [
        (on_cpu(), "compute-bound"),
        (on_cpu(data=0.19), "compute-bound"),
        (on_cpu(data=0.5), "data-bound"),
        (on_cpu(log=0.3), "none"),
        (on_cpu(calls=49_000), "none"),
        (on_cpu(calls=51_000), "host-bound"),
        (on_cpu(calls=None), "none"),
        (on_cpu(busy=0.4), "host-bound"),
        (on_cpu(busy=0.9), "compute-bound"),
        (on_cpu(syncs={"model.py:7": 0.3, "model.py:9": 0.1}), "sync"),
        (on_cpu(evaluate=0.4), "slow validation"),
        (on_cpu(checkpoint=0.3), "slow checkpoint"),
        (on_cpu(checkpoint=0.3, updates=3), "none"),
        (on_cpu(ranks=[0.2, 0.9]), "slow rank"),
        (on_cpu(ranks=[0.8, 0.9, 0.85]), "compute-bound"),
        (on_gpu(0.95), "compute-bound"),
        (on_gpu(0.95, data=0.5), "compute-bound"),
        (on_gpu(0.95, syncs={"model.py:7": 0.6}), "compute-bound"),
        (on_gpu(0.5), "host-bound"),
        (on_gpu(0.5, wait=0.4), "none"),
        (on_gpu(0.5, data=0.3), "data-bound"),
        (on_gpu(0.5, to_device=0.3, data=0.1), "transfer-bound"),
        (on_gpu(0.5, syncs={"model.py:7": 0.4}), "sync"),
        (on_gpu(0.5, evaluate=0.45), "slow validation"),
        (Measured(phases={}), "none"),
    ],
)
def test_the_kind_is_the_largest_loss(measured: Measured, kind: str) -> None:
    found = verdict(measured)
    assert found.kind == kind
    assert bool(found.cause) == bool(found.cure) == (kind != "none")
    assert "{" not in str(found)


SECONDS = st.floats(0, 10)


@given(st.lists(SECONDS, min_size=9, max_size=9), SECONDS, st.booleans(), st.lists(SECONDS, max_size=3))
def test_a_loss_is_a_part_of_the_time(phases: list[float], busy: float, cpu: bool, syncs: list[float]) -> None:
    names = ("data", "to_device", "forward", "backward", "optimizer", "evaluate", "checkpoint", "log", "wait")
    places = {f"model.py:{line}": seconds for line, seconds in enumerate(syncs)}
    measured = Measured(phases=dict(zip(names, phases, strict=True)), on_cpu=cpu, busy=busy, syncs=places)
    lost, _ = divided(measured)
    assert all(seconds >= 0 for seconds in lost.values())
    found = verdict(measured)
    assert 0 <= found.share <= 1
    assert found.kind in ("none", "compute-bound") or found.share >= LOST


def test_waiting_for_data_is_divided_into_dataset_and_collate() -> None:
    assert "samples of the dataset" in verdict(on_cpu(data=0.5, collate=0.1)).cause
    assert "collate_fn" in verdict(on_cpu(data=0.5, collate=0.4)).cause
    assert "most of it" not in verdict(on_cpu(data=0.5)).cause


@pytest.mark.parametrize(("workers", "told"), [(0, "num_workers=4"), (4, "num_workers=8"), (8, None), (None, None)])
def test_more_workers_are_advised_up_to_the_cores(workers: int | None, told: str | None) -> None:
    cure = verdict(on_cpu(data=0.5, workers=workers, cores=8)).cure
    assert told in cure if told else "num_workers" not in cure


def test_the_words_name_the_line_the_rank_and_the_bytes() -> None:
    assert "above all in b.py:2." in verdict(on_cpu(syncs={"a.py:1": 0.1, "b.py:2": 0.3})).cause
    assert "rank 1" in verdict(on_cpu(ranks=[0.1, 0.9, 0.2])).cause
    assert "2 MiB an update" in verdict(on_gpu(0.1, to_device=0.5, moved=2 << 20)).cause


def test_what_helps_is_asked_of_the_plugins_and_never_what_the_run_has_already() -> None:
    assert "-p cuda_graph" in verdict(on_gpu(0.5)).cure
    assert "-p cuda_graph" not in verdict(on_cpu(calls=90_000)).cure
    for measured, thing, cure in (
        (on_gpu(0.5), "step_capture", "-p cuda_graph"),
        (on_gpu(0.5), "compile", "-p compile"),
        (on_gpu(0.9), "autocast", "-p amp"),
        (on_gpu(0.5, to_device=0.4), "prefetch", "-p prefetch"),
    ):
        assert cure in verdict(measured).cure
        assert cure not in verdict(replace(measured, provides=frozenset({thing}))).cure


def test_values_that_the_step_reads_are_named_where_they_are_many_of_its_operators() -> None:
    reads = {"train.py:12": 20_000.0, "train.py:14": 1.0}
    told = verdict(on_cpu(calls=90_000, reads=reads))
    assert told.kind == "host-bound"
    assert "20,001 values read, above all in train.py:12" in told.cause
    assert told.cure.startswith("Leave .item()") or ". Leave .item()" in told.cure
    assert "read" not in verdict(on_cpu(calls=90_000, reads={"train.py:12": 1.0})).cause
