"""The application behind `forge serve`: its endpoints, its limits, and bodies from strangers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.types import Message, Receive

from forge_ship.engine import ExportError, Port
from forge_ship.serving.http_answers import ModelService, make_app
from forge_ship.serving.limits import ServeLimits
from forge_ship.serving.protocol import JSON
from tests.support import serving_kit
from tests.support.patience import PATIENCE
from tests.support.serving_kit import FAST, Body, X, check_refusal, client_of, expected, post, service_of
from tests.support.small_engines import GatedEngine, LinearEngine

linear = serving_kit.linear
tokens = serving_kit.tokens


# ---------------------------------------------------------------------------------------------------------------------
# Answers


def test_json_is_answered_as_json(linear: TestClient) -> None:
    answer = post(linear, {"x": X})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == JSON
    assert torch.equal(torch.tensor(answer.json()["outputs"]["y"]), expected(linear, X))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "uint8", "int32", "bool"])
def test_every_dtype_is_read_and_written(dtype: str) -> None:
    values = [[True, False]] if dtype == "bool" else [[1, 0]]
    engine = LinearEngine()
    engine.inputs = engine.outputs = (Port("x", dtype, ("batch", 2)),)
    engine.__class__ = type("Same", (LinearEngine,), {"__call__": lambda self, given: dict(given)})
    with client_of(engine) as client:
        assert post(client, {"x": values}).json() == {"outputs": {"x": values}}


def test_a_complex_model_is_refused() -> None:
    engine = LinearEngine()
    engine.outputs = (Port("y", "complex64", ("batch", 3)),)
    with pytest.raises(ExportError, match="y is complex64, which JSON cannot hold"):
        make_app(engine)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


MALFORMED: list[tuple[Body, str]] = [
    (b"\xff\xfe\x00", "not valid JSON"),
    ('{"x": [[1, 2, 3, 4]]', "not valid JSON"),
    ('{"x": [[1, 2, 3, NaN]]}', "NaN is not a JSON number"),
    ('{"x": [[1, 2, 3, 1e999]]}', "NaN or infinity"),
    ('{"x": [[1, 2, 3, 1e300]]}', "NaN or infinity as float32"),
    ('{"x": [[1, 2, 3, 1' + "0" * 5000 + "]]}", "not valid JSON|more than"),
    ('{"x": [[1, 2, 3, 4]], "x": [[1, 2, 3, 4]]}', "occurs twice"),
    ("[" * 2000, "nested too deeply"),
    ("[[1, 2, 3, 4]]", "must be an object"),
    ({}, "takes x; the body has nothing"),
    ({"x": None}, "nested lists of numbers"),
    ({"inputs": {"x": X}}, "takes x; the body has 'inputs'"),
    ({"z": X}, "takes x; the body has 'z'"),
    ({"x": X, "z": X}, "'x', 'z'"),
    ({"x": [1, 2, 3, 4]}, "list of one"),
    ({"x": [[1, 2, 3]]}, "batch × 4; it has 1 × 3"),
    ({"x": []}, "batch × 4; it has 0"),
    ({"x": [[1, 2, 3, "4"]]}, "nested lists of numbers"),
    ({"x": [[1, 2, 3, None]]}, "nested lists of numbers"),
    ({"x": [*X, [1, 2, 3]]}, "all of equal length"),
]


@pytest.mark.parametrize(("body", "message"), MALFORMED)
def test_malformed_json_is_refused(linear: TestClient, body: Body, message: str) -> None:
    check_refusal(post(linear, body), message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"ids": [[1, 2]]}, "takes ids, mask"),
        ({"ids": [[1.5, 2]], "mask": [[True, True]]}, "int64: send whole numbers"),
        ({"ids": [[True, True]], "mask": [[True, True]]}, "int64: send whole numbers"),
        ({"ids": [[1, 2**63]], "mask": [[True, True]]}, "nested lists of numbers"),
        ({"ids": [[1, 2]], "mask": [[0, 1]]}, "send true and false"),
        ({"ids": [[1, 2]], "mask": [[True, True, True]]}, "mask must have the shape"),
        ({"ids": [[1] * 7], "mask": [[True] * 7]}, "at most 6, or start the server with --max-axis length=N"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(tokens: TestClient, body: Body, message: str) -> None:
    check_refusal(post(tokens, body), message)


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"Content-Type": "text/plain"}, 415, "Content-Type to application/json"),
        ({}, 415, "Content-Type"),
        ({"Content-Type": JSON, "Content-Encoding": "gzip"}, 415, "uncompressed"),
    ],
)
def test_other_formats_are_refused(linear: TestClient, headers: dict[str, str], status: int, message: str) -> None:
    answer = linear.post("/predict", content=b"{}", headers=headers)
    check_refusal(answer, message, (status,))


def test_more_rows_than_a_batch_are_refused(linear: TestClient) -> None:
    check_refusal(post(linear, {"x": X * 5}), "at most 4, or start the server with --max-batch", (413,))


def test_large_bodies_are_refused_without_reading_on(linear: TestClient) -> None:
    answer = post(linear, b" " * 5000)
    check_refusal(answer, "more than 4,096 bytes", (413,))
    assert answer.headers["connection"] == "close"


@given(body=st.binary(max_size=200))
def test_any_bytes_get_an_answer_that_is_no_5xx(linear: TestClient, body: bytes) -> None:
    assert post(linear, body).status_code < 500


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(["x", "inputs", "z"]), inner),
    max_leaves=20,
)


@given(value=JSON_VALUES)
def test_any_json_gets_an_answer_that_is_no_5xx(linear: TestClient, value: Any) -> None:
    for body in (value, {"x": value}):
        assert post(linear, body).status_code < 500


# ---------------------------------------------------------------------------------------------------------------------
# The queue, failures, time limits


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def test_a_full_queue_is_a_429() -> None:
    engine = GatedEngine()
    with client_of(engine, warmup=False) as client:
        running = in_thread(lambda: post(client, {"x": X}))
        assert engine.begun.wait(PATIENCE)
        others = [in_thread(lambda: post(client, {"x": X})) for _ in range(2)]
        while service_of(client).waiting < 2:
            client.get("/health")
        answer = post(client, {"x": X})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert "2 requests are waiting" in answer.json()["error"]
        engine.gate.set()
        for thread, results in [running, *others]:
            thread.join()
            assert results[0].status_code == 200
        assert post(client, {"x": X}).status_code == 200


def test_a_request_past_its_time_is_a_504() -> None:
    engine = GatedEngine()
    limits = ServeLimits(max_batch=1, max_wait=0.0, timeout=0.02)  # limit: it expires: what is waited for never comes
    with client_of(engine, limits, warmup=False) as client:
        running = in_thread(lambda: post(client, {"x": X}))
        assert engine.begun.wait(PATIENCE)
        late = post(client, {"x": X})
        assert late.status_code == 504
        assert "did not answer within 0.02 seconds" in late.json()["error"]
        running[0].join()
        assert running[1][0].status_code == 504
        assert service_of(client).waiting == 0  # the second was withdrawn
        stuck = client.get("/ready")
        assert stuck.status_code == 503
        assert "longer than the time limit" in stuck.json()["error"]
        engine.gate.set()


def test_a_failing_engine_is_a_500_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with client_of(LinearEngine()) as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service_of(client).engine, "model", broken)
            answer = post(client, {"x": X})
        assert answer.status_code == 500
        assert answer.json() == {"error": "The model failed on this request; the server's log has the reason."}
        assert "The model failed on x (1, 4): RuntimeError: secret/path.py: broken" in caplog.text
        assert post(client, {"x": X}).status_code == 200


def broken(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("secret/path.py: broken")


def test_a_bug_of_the_server_is_a_500_without_a_traceback() -> None:
    app = make_app(LinearEngine(), FAST)
    with TestClient(app, raise_server_exceptions=False) as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelService, "_decoded", lambda *arguments: 1 / 0)
        answer = post(client, {"x": X})
    check_refusal(answer, "The server failed on this request", (500,))


async def call(client_app: Starlette, receive: Receive) -> tuple[int, dict[str, str]]:
    """Call the application as a server does, with a client whose messages the test gives; return status and headers."""
    started: list[Message] = []

    async def send(message: Message) -> None:
        started.append(message)

    headers = [(b"content-type", JSON.encode())]
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers, "query_string": b""}
    await client_app(scope, receive, send)
    return started[0]["status"], {name.decode(): value.decode() for name, value in started[0]["headers"]}


def endless(size: int, most: int = 10**9) -> tuple[list[int], Receive]:
    """A body without a length and without an end, in parts of so many bytes; after `most` bytes nothing comes."""
    received: list[int] = []

    async def receive() -> Message:
        if sum(received) >= most:
            await asyncio.Event().wait()
        received.append(size)
        return {"type": "http.request", "body": b" " * size, "more_body": True}

    return received, receive


def test_a_body_without_a_length_is_not_read_to_its_end() -> None:
    received, receive = endless(1000)
    status, headers = asyncio.run(call(make_app(LinearEngine(), FAST), receive))
    assert (status, headers["connection"]) == (413, "close")
    assert sum(received) == 5000


def test_a_body_that_does_not_arrive_is_a_408() -> None:
    limits = ServeLimits(timeout=0.01)  # limit: it expires: what is waited for never comes
    app = make_app(LinearEngine(), limits)
    assert asyncio.run(call(app, endless(1, most=0)[1]))[0] == 408


def whole(body: Body) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    return receive


async def answered_beside(senders: list[Receive]) -> tuple[int, list[int]]:
    """Return the status of a request beside those who send without an end, and which of those have ended."""
    app = make_app(LinearEngine(), FAST, warmup=False)
    service = app.state.service
    async with service.lifespan(app):
        slow = [asyncio.create_task(call(app, sender)) for sender in senders]
        for _ in range(50):
            await asyncio.sleep(0)
        assert service.waiting == 0
        status = (await call(app, whole({"x": X})))[0]
        ended = [at for at, task in enumerate(slow) if task.done() and task.result()[0] == 408]
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
    return status, ended


def test_slow_senders_keep_no_place_of_others() -> None:
    """The queue of two is for requests that are complete."""
    assert asyncio.run(answered_beside([endless(1, most=8)[1] for _ in range(300)])) == (200, [])


def test_bodies_that_are_read_have_a_bound_together_and_the_oldest_ends_first() -> None:
    """16 bodies of the largest size; each of these twenty holds nearly that."""
    status, ended = asyncio.run(answered_beside([endless(4000, most=4000)[1] for _ in range(20)]))
    assert (status, ended) == (200, [0, 1, 2, 3])
