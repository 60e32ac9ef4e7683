"""The application: what the server answers at each address."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from forge.util.text import format_bytes
from forge_ship.engine import Engine, ExportError, row_bytes
from forge_ship.serving import protocol
from forge_ship.serving.batcher import Batcher, EngineFailure, InputRejected, Outputs
from forge_ship.serving.limits import ServeLimits
from forge_ship.serving.metrics import ServerMetrics
from forge_ship.serving.protocol import JSON, Refused
from forge_ship.serving.rejected_inputs import zeros_of

logger = logging.getLogger("forge")

LARGE = 256 * 1024
"""Bytes of a body from which on it is read in another thread, so that the server answers others meanwhile."""
LOOK = 0.25
"""Seconds between two looks whether the client of a waiting request has gone."""
CLIENT_GONE = 499
"""The status in the metrics of a request whose client did not wait; nginx's number."""
ENDPOINTS = "POST /predict, GET /health, GET /ready, GET /metrics, GET /v1/model"


def make_app(
    engine: Engine,
    limits: ServeLimits | None = None,
    *,
    name: str = "model",
    kind: str = "",
    warmup: bool = True,
    hosts: Sequence[str] = ("*",),
) -> Starlette:
    """Return the ASGI application that serves an engine; `kind` is the model's format. `app.state.service` has its
    state. `hosts` are the names that requests may call the server by, as in starlette's TrustedHostMiddleware."""
    limits = limits or ServeLimits()
    row = row_bytes(engine.inputs)
    if row > limits.max_body:
        raise ExportError(
            f"One row of the model's inputs takes {format_bytes(row)}, and a request may have "
            f"{format_bytes(limits.max_body)}. If the model is right about its inputs, raise --max-body."
        )
    service = ModelService(engine, limits, name, kind, warmup)
    routes = [
        Route("/predict", service.predict, methods=["POST"]),
        Route("/health", service.health, methods=["GET"]),
        Route("/ready", service.ready, methods=["GET"]),
        Route("/metrics", service.metrics_text, methods=["GET"]),
        Route("/v1/model", service.model, methods=["GET"]),
    ]
    handlers: Mapping[Any, Any] = {HTTPException: _http_problem, Exception: _unexpected_problem}
    trusted = Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    app = Starlette(routes=routes, middleware=[trusted], exception_handlers=handlers, lifespan=service.lifespan)
    app.state.service = service
    return app


class ModelService:
    """A model, its batcher and the handlers of requests."""

    def __init__(self, engine: Engine, limits: ServeLimits, name: str, kind: str, warmup: bool):
        self.engine, self.limits, self.name, self.kind = engine, limits, name, kind
        self.failure: BaseException | None = None
        "Why the model could not compute its first batch."
        self.warm = asyncio.Event()
        "Set once the model is warm, or has failed."
        self.stopping = False
        self.cancelled = 0
        "Requests that were dropped at the end."
        self._warmup = warmup
        self._reading = 0
        self._large = asyncio.Semaphore(1)
        self._metrics = ServerMetrics(limits, lambda: self.waiting, lambda: not self._not_ready())

    @property
    def waiting(self) -> int:
        """Requests that are read, or wait for the engine."""
        return self._reading + (self._batcher.waiting if hasattr(self, "_batcher") else 0)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._batcher = Batcher(self.engine, self.limits.max_batch, self.limits.max_wait)
        warming = asyncio.create_task(self._warm_up())
        try:
            yield
        finally:
            self.stopping = True
            warming.cancel()
            self._batcher.close()

    async def _warm_up(self) -> None:
        """Compute zeros: one row, then a full batch. First calls compile, allocate and load libraries."""
        try:
            for rows in dict.fromkeys((1, self.limits.max_batch)) if self._warmup else ():
                await self._batcher.submit({port.name: zeros_of(port, rows) for port in self.engine.inputs}, rows)
            self._batcher.observe = self._metrics.batch
        except EngineFailure as error:
            self.failure = error
        except InputRejected as error:  # it can compute one row of zeros, but not a full batch
            self.failure = error.failure
        self.warm.set()

    def _not_ready(self) -> str:
        """Return why no requests should come; empty if they may."""
        if self.stopping:
            return "The server is stopping."
        if self.failure is not None:
            return "The model failed on its first batch; see the server's log."
        if not self.warm.is_set():
            return "The model is warming up."
        since = self._batcher.busy_since
        if since is not None and asyncio.get_running_loop().time() - since > self.limits.timeout:
            return "The model has computed one batch for longer than the time limit."
        return ""

    # -----------------------------------------------------------------------------------------------------------------
    # Handlers

    async def health(self, request: Request) -> Response:
        return _json({"status": "up"})

    async def ready(self, request: Request) -> Response:
        reason = self._not_ready()
        return _problem(503, reason) if reason else _json({"status": "ready"})

    async def metrics_text(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def model(self, request: Request) -> Response:
        return _json(
            {
                "model": self.name,
                "format": self.kind,
                "inputs": [asdict(port) for port in self.engine.inputs],
                "outputs": [asdict(port) for port in self.engine.outputs],
                "batching": self._batcher.batches,
                "limits": {
                    "max_batch": self.limits.max_batch,
                    "max_wait_ms": self.limits.max_wait * 1000,
                    "max_body_bytes": self.limits.max_body,
                    "queue": self.limits.queue,
                    "max_connections": self.limits.max_connections,
                    "timeout_s": self.limits.timeout,
                    "header_timeout_s": self.limits.header_timeout,
                    "max_axes": dict(self.limits.max_axes),
                },
            }
        )

    async def predict(self, request: Request) -> Response:
        start = time.perf_counter()
        try:
            response = await self._predict(request, asyncio.get_running_loop().time() + self.limits.timeout)
        except Refused as refused:
            response = _problem(refused.status, str(refused), refused.headers)
        except ClientDisconnect:
            response = Response(status_code=CLIENT_GONE)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        except InputRejected as rejected:
            response = _problem(422, str(rejected))
        except EngineFailure:
            response = _problem(500, "The model failed on this request; the server's log has the reason.")
        self._metrics.request(response.status_code, time.perf_counter() - start)
        return response

    async def _predict(self, request: Request, deadline: float) -> Response:
        if self.failure is not None or not self.warm.is_set():
            raise Refused(503, self._not_ready(), {"Retry-After": "1"})
        headers = request.headers
        kind = protocol.body_format(headers.get("content-type"), headers.get("content-encoding"))
        answer_kind = protocol.answer_format(headers.get("accept"), kind)
        if self.waiting >= self.limits.queue:
            text = f"{self.limits.queue} requests are waiting already: send this one again later."
            raise Refused(429, text, {"Retry-After": "1"})
        self._reading += 1
        try:
            body = await self._body(request, deadline)
            inputs, rows = await self._decoded(body, kind)
            answer = self._batcher.submit(inputs, rows)
        finally:
            self._reading -= 1
        outputs = await self._outputs(answer, request, deadline)
        return Response(protocol.encode(outputs, answer_kind), media_type=answer_kind)

    async def _body(self, request: Request, deadline: float) -> bytes:
        """Read a body, and no more of it than is allowed."""
        most, length = self.limits.max_body, request.headers.get("content-length", "")
        # the rest of the body is not read, so that the connection cannot be used again
        large = Refused(413, f"The body has more than {most:,} bytes: send fewer rows.", {"Connection": "close"})
        if length.isdecimal() and int(length[:20]) > most:
            raise large
        body = bytearray()
        try:
            async with asyncio.timeout_at(deadline):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise large
        except TimeoutError as error:
            text = f"The body did not arrive within {self.limits.timeout:g} seconds."
            raise Refused(408, text, {"Connection": "close"}) from error
        return bytes(body)

    async def _decoded(self, body: bytes, kind: str) -> tuple[dict[str, Tensor], int]:
        arguments = (body, kind, self.engine.inputs, self.limits)
        if len(body) < LARGE:
            return protocol.decode(*arguments)
        async with self._large:  # one at a time: values take many times the memory of their text
            return await asyncio.to_thread(protocol.decode, *arguments)

    async def _outputs(self, answer: asyncio.Future[Outputs], request: Request, deadline: float) -> Outputs:
        """Wait for the outputs; withdraw the request at its deadline, or when its client has gone."""
        loop = asyncio.get_running_loop()
        try:
            while not answer.done():
                left = deadline - loop.time()
                if left <= 0:
                    raise Refused(504, f"The model did not answer within {self.limits.timeout:g} seconds.")
                await asyncio.wait((answer,), timeout=min(left, LOOK))
                if not answer.done() and await request.is_disconnected():
                    raise ClientDisconnect
            return answer.result()
        finally:
            answer.cancel()


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, JSON)


def _problem(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return _json({"error": message}, status, headers)


def _http_problem(request: Request, error: HTTPException) -> Response:
    """Answer a path or a method that there is not."""
    return _problem(error.status_code, f"{error.detail}. There are {ENDPOINTS}.", error.headers)


def _unexpected_problem(request: Request, error: Exception) -> Response:
    """Answer where the server itself fails; the error is logged by the server, not sent."""
    return _problem(500, "The server failed on this request; its log has the reason.")
