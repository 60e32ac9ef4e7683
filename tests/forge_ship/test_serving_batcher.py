"""The batcher: which requests are computed together, and who gets which outcome. No sockets, no clocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from forge_ship.engine import Engine, Port
from forge_ship.serving.batcher import Batcher, EngineFailure, QueuedRequest, can_batch, next_batch
from tests.support.serving_kit import in_a_loop
from tests.support.small_engines import GatedEngine, LinearEngine, MeanEngine, PickyEngine, TokensEngine


@asynccontextmanager
async def batching(engine: Engine, max_batch: int = 8, max_wait: float = 0.0) -> AsyncIterator[Batcher]:
    batcher = Batcher(engine, max_batch, max_wait)
    try:
        yield batcher
    finally:
        batcher.close()


def rows(*firsts: float) -> dict[str, Tensor]:
    return {"x": torch.tensor([[first, 1.0, 2.0, 3.0] for first in firsts])}


async def begun(engine: GatedEngine) -> None:
    assert await asyncio.to_thread(engine.begun.wait, 30)


# ---------------------------------------------------------------------------------------------------------------------
# The queue, with a clock that the test sets


def queued(arrived: float, count: int = 1, key: str = "a") -> QueuedRequest:
    return QueuedRequest({}, count, arrived, key, None)  # pyright: ignore[reportArgumentType]


def test_a_request_is_due_after_the_longest_wait() -> None:
    waiting = [queued(10.0), queued(10.25)]
    assert next_batch(waiting, 4, 0.5, 10.25) == ([], 0.25)  # of the first: a later one does not prolong its wait
    assert next_batch(waiting, 4, 0.5, 10.5) == (waiting, 0.0)
    assert next_batch([], 4, 0.5, 10.5) == ([], None)


def test_a_full_batch_is_due_at_once() -> None:
    waiting = [queued(10.0, 3), queued(10.0, 1), queued(10.0, 1)]
    assert next_batch(waiting, 4, 0.5, 10.0) == (waiting[:2], 0.0)
    assert next_batch(waiting[2:], 4, 0.5, 10.0) == ([], 0.5)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4)), max_size=30))
def test_every_request_is_taken_once_and_in_order(arrivals: list[tuple[str, int]]) -> None:
    requests = [queued(float(at), count, key) for at, (key, count) in enumerate(arrivals)]
    waiting, taken = [*requests], []
    while waiting:
        batch, _ = next_batch(waiting, 4, 1.0, 1e9)
        assert 1 <= sum(request.rows for request in batch) <= 4
        assert len({request.key for request in batch}) == 1
        waiting = [request for request in waiting if request not in batch]
        taken += batch
    for wanted in "ab":
        assert [r for r in taken if r.key == wanted] == [r for r in requests if r.key == wanted]


# ---------------------------------------------------------------------------------------------------------------------
# The engine's thread


@in_a_loop
async def test_requests_that_wait_are_computed_together() -> None:
    engine = GatedEngine()
    async with batching(engine, max_batch=8) as batcher:
        first = batcher.submit(rows(0), 1)
        await begun(engine)
        others = [batcher.submit(rows(*range(n, n + 2)), 2) for n in range(5)]
        assert batcher.waiting == 5
        engine.gate.set()
        answers = await asyncio.gather(first, *others)
    assert engine.sizes == [1, 8, 2]
    for answer, inputs in zip(answers, [rows(0), *(rows(n, n + 1) for n in range(5))], strict=True):
        assert torch.allclose(answer["y"], engine.model(inputs["x"]), atol=1e-6)


@in_a_loop
async def test_an_idle_engine_waits_for_a_full_batch() -> None:
    engine = LinearEngine()
    async with batching(engine, max_batch=4, max_wait=3600.0) as batcher:
        answers = [batcher.submit(rows(n), 1) for n in range(4)]
        await asyncio.gather(*answers)  # the batch is full: nothing waits an hour
    assert engine.sizes == [4]


@in_a_loop
async def test_a_batch_that_does_not_fill_is_computed() -> None:
    engine = LinearEngine()
    async with batching(engine, max_batch=4, max_wait=0.001) as batcher:
        await asyncio.gather(batcher.submit(rows(1), 1), batcher.submit(rows(2), 1))
        await batcher.submit(rows(3), 1)
    assert engine.sizes == [2, 1]


@in_a_loop
async def test_other_lengths_are_computed_apart() -> None:
    engine = TokensEngine()

    def tokens(length: int, value: int) -> dict[str, Tensor]:
        ids = torch.full((1, length), value)
        return {"ids": ids, "mask": ids > 1}

    async with batching(engine, max_batch=8, max_wait=0.001) as batcher:
        asked = [(3, 1), (5, 2), (3, 3), (5, 4)]
        answers = await asyncio.gather(*(batcher.submit(tokens(*pair), 1) for pair in asked))
    assert sorted(engine.shapes) == [(2, 3), (2, 5)]
    for (length, value), answer in zip(asked, answers, strict=True):
        assert answer["twice"].tolist() == [[2 * value]] * length  # the batch is the second axis
        assert answer["count"].tolist() == [length if value > 1 else 0]


@in_a_loop
async def test_an_error_goes_to_the_request_that_causes_it() -> None:
    engine = PickyEngine()
    async with batching(engine, max_batch=4, max_wait=3600.0) as batcher:
        answers = [batcher.submit(rows(n), 1) for n in (1, 13, 2, 3)]
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        assert [isinstance(outcome, EngineFailure) for outcome in outcomes] == [False, True, False, False]
        again = await asyncio.gather(*(batcher.submit(rows(n), 1) for n in range(4)))
    assert engine.sizes == [4, 1, 1, 1, 1, 4]  # all, each alone, all again
    assert len(again) == 4


@in_a_loop
async def test_an_engine_that_exits_does_not_end_the_thread() -> None:
    engine = LinearEngine()
    vars(engine.model)["forward"] = lambda x: exit(3)
    async with batching(engine) as batcher:
        for _ in range(2):
            with pytest.raises(EngineFailure, match="SystemExit"):
                await batcher.submit(rows(1), 1)


@in_a_loop
async def test_wrong_numbers_of_rows_are_no_answer() -> None:
    engine = LinearEngine()
    vars(engine.model)["forward"] = lambda x: x[:1, :3]
    async with batching(engine, max_batch=2, max_wait=3600.0) as batcher:
        outcomes = await asyncio.gather(batcher.submit(rows(1), 1), batcher.submit(rows(2), 1))
        assert [outcome["y"].tolist() for outcome in outcomes] == [[[1, 1, 2]], [[2, 1, 2]]]  # each alone is right
        with pytest.raises(EngineFailure, match="1 rows for a batch of 2"):
            await batcher.submit(rows(1, 2), 2)


@in_a_loop
async def test_a_cancelled_request_leaves_the_queue() -> None:
    engine = GatedEngine()
    async with batching(engine) as batcher:
        running = batcher.submit(rows(0), 1)
        await begun(engine)
        kept, gone = batcher.submit(rows(1), 1), batcher.submit(rows(2), 1)
        gone.cancel()
        await asyncio.sleep(0)
        assert batcher.waiting == 1
        running.cancel()  # too late: it is computed, and its answer is dropped
        engine.gate.set()
        await kept
    assert engine.sizes == [1, 1]


@in_a_loop
async def test_an_output_over_all_rows_is_not_shared() -> None:
    engine = MeanEngine()
    assert not can_batch(engine)
    async with batching(engine, max_wait=3600.0) as batcher:  # and nothing waits for others
        answers = [batcher.submit({"x": torch.full((2, 2), float(n))}, 2) for n in range(3)]
        assert [float(answer["mean"]) for answer in await asyncio.gather(*answers)] == [0, 1, 2]
    assert engine.sizes == [2, 2, 2]


@pytest.mark.parametrize("shape", [(2, 3), ("batch", "batch"), ("rows", 3)])
def test_a_model_without_one_batch_axis_cannot_batch(shape: tuple[int | str, ...]) -> None:
    engine = LinearEngine()
    engine.outputs = (Port("y", "float32", shape),)
    assert can_batch(LinearEngine())
    assert not can_batch(engine)


@in_a_loop
async def test_the_observer_gets_rows_and_requests() -> None:
    seen: list[tuple[int, int]] = []
    async with batching(LinearEngine(), max_batch=4, max_wait=3600.0) as batcher:
        batcher.observe = lambda count, requests, seconds: seen.append((count, requests))
        await asyncio.gather(batcher.submit(rows(1, 2, 3), 3), batcher.submit(rows(4), 1))
    assert seen == [(4, 2)]
