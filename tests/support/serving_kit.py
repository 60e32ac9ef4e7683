"""Clients of the application behind `forge serve`, without a network."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from forge_ship.engine import Engine
from forge_ship.serving.http_answers import ModelService, make_app
from forge_ship.serving.limits import ServeLimits
from forge_ship.serving.protocol import JSON
from tests.support.small_engines import LinearEngine, TokensEngine

X = [[1.0, 2.0, 3.0, 4.0]]
FAST = ServeLimits(max_batch=4, max_wait=0.0, max_body=4096, queue=2)
Body = bytes | str | dict[str, Any] | list[Any]


@contextmanager
def client_of(engine: Engine, limits: ServeLimits = FAST, **options: Any) -> Iterator[TestClient]:
    app = make_app(engine, limits, **options)
    with TestClient(app) as client:
        yield client


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def service_of(client: TestClient) -> ModelService:
    return client.app.state.service  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]


@pytest.fixture(scope="module")
def linear() -> Iterator[TestClient]:
    with client_of(LinearEngine()) as client:
        yield client


@pytest.fixture(scope="module")
def tokens() -> Iterator[TestClient]:
    with client_of(TokensEngine()) as client:
        yield client


def expected(client: TestClient, x: list[list[float]]) -> torch.Tensor:
    engine = service_of(client).engine
    assert isinstance(engine, LinearEngine)
    return engine.model(torch.tensor(x)).detach()


def post(client: TestClient, body: Body, kind: str = JSON, **headers: str) -> Any:
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    return client.post("/predict", content=content, headers={"Content-Type": kind, **headers})


def check_refusal(answer: Any, message: str, statuses: tuple[int, ...] = (400, 413)) -> None:
    text = answer.json()["error"]
    assert answer.status_code in statuses, text
    assert re.search(message, text), text
    assert "\n" not in text
    assert "Traceback" not in text
    assert len(text) < 400
