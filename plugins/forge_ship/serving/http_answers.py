"""The application: what the server answers at each address."""

from __future__ import annotations

import asyncio
import json
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
from forge_ship.serving.batcher import Batcher, EngineFailure, Outputs, zeros_of
from forge_ship.serving.limits import ServeLimits
from forge_ship.serving.metrics import ServerMetrics
from forge_ship.serving.protocol import JSON, Refused

BODIES = 16
"""So many times the bytes of the largest body may be held of all bodies that are being read."""
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
    """Return the ASGI application that serves an engine; `kind` is the model's format. It starts once the model is
    warm. `app.state.service` has its state. `hosts` are the names that requests may call the server by, as in
    starlette's TrustedHostMiddleware."""
    limits = limits or ServeLimits()
    row = row_bytes(engine.inputs)
    if row > limits.max_body:
        raise ExportError(
            f"One row of the model's inputs takes {format_bytes(row)}, and a request may have "
            f"{format_bytes(limits.max_body)}. If the model is right about its inputs, raise --max-body."
        )
    for port in (*engine.inputs, *engine.outputs):
        if port.dtype.startswith("complex"):
            raise ExportError(f"{port.name} is {port.dtype}, which JSON cannot hold: give the real parts as float32.")
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


class Bodies:
    """The bodies that are being read. Together they may hold so many bytes: beyond it the oldest one has to end.

    So one who sends slowly takes the place of nobody: he keeps his own until it is needed.
    """

    def __init__(self, limits: ServeLimits):
        self._limits = limits
        self._held: dict[asyncio.Timeout, int] = {}

    async def read(self, request: Request, deadline: float) -> bytes:
        """Return a body, and read no more of it than is allowed."""
        most, length = self._limits.max_body, request.headers.get("content-length", "")
        # the rest of the body is not read, so that the connection cannot be used again
        large = Refused(413, f"The body has more than {most:,} bytes: send fewer rows.", {"Connection": "close"})
        if length.isdecimal() and int(length[:20]) > most:
            raise large
        body, clock = bytearray(), asyncio.timeout_at(deadline)
        try:
            async with clock:
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise large
                    self._hold(clock, len(body))
        except TimeoutError as error:
            text = f"The body did not arrive within {self._limits.timeout:g} seconds, or others needed its place."
            raise Refused(408, text, {"Connection": "close"}) from error
        finally:
            self._held.pop(clock, None)
        return bytes(body)

    def _hold(self, clock: asyncio.Timeout, size: int) -> None:
        self._held[clock] = size
        while sum(self._held.values()) > BODIES * self._limits.max_body:
            oldest = next(iter(self._held))
            del self._held[oldest]
            oldest.reschedule(0.0)


class ModelService:
    """A model, its batcher and the handlers of requests."""

    def __init__(self, engine: Engine, limits: ServeLimits, name: str, kind: str, warmup: bool):
        self.engine, self.limits, self.name, self.kind = engine, limits, name, kind
        self.failure: BaseException | None = None
        "Why the model could not compute its first batch."
        self.stopping = False
        self.cancelled = 0
        "Requests that were dropped at the end."
        self._warmup = warmup
        self._bodies = Bodies(limits)
        self._decoding = 0
        self._large = asyncio.Semaphore(1)
        self._metrics = ServerMetrics(lambda: self.waiting, lambda: not self._not_ready())

    @property
    def waiting(self) -> int:
        """Requests that are complete, and wait for the engine."""
        return self._decoding + (self._batcher.waiting if hasattr(self, "_batcher") else 0)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._batcher = Batcher(self.engine, self.limits.max_batch, self.limits.max_wait)
        try:
            await self._warm_up()
            yield
        finally:
            self.stopping = True
            self._batcher.close()

    async def _warm_up(self) -> None:
        """Compute zeros: one row, then a full batch. First calls compile, allocate and load libraries."""
        for rows in dict.fromkeys((1, self.limits.max_batch)) if self._warmup else ():
            answer = self._batcher.submit({port.name: zeros_of(port, rows) for port in self.engine.inputs}, rows)
            while not answer.done() and not self.stopping:
                await asyncio.wait((answer,), timeout=LOOK)
            if self.stopping:
                return
            self.failure = answer.exception()
            if self.failure is not None:
                return
        self._batcher.observe = self._metrics.batch

    def _not_ready(self) -> str:
        """Return why no requests should come; empty if they may."""
        if self.stopping:
            return "The server is stopping."
        since = self._batcher.busy_since
        if since is not None and asyncio.get_running_loop().time() - since > self.limits.timeout:
            return "The model has computed one batch for longer than the time limit."
        return ""

    # -- handlers -----------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        return _json({"status": "up"})

    async def ready(self, request: Request) -> Response:
        reason = self._not_ready()
        return _problem(503, reason) if reason else _json({"status": "ready"})

    async def metrics_text(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def model(self, request: Request) -> Response:
        described = {"model": self.name, "format": self.kind, "batching": self._batcher.batches}
        ports = {"inputs": self.engine.inputs, "outputs": self.engine.outputs}
        listed = {kind: [asdict(port) for port in each] for kind, each in ports.items()}
        return _json({**described, **listed, "limits": asdict(self.limits)})

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
        except EngineFailure:
            response = _problem(500, "The model failed on this request; the server's log has the reason.")
        self._metrics.request(response.status_code, time.perf_counter() - start)
        return response

    async def _predict(self, request: Request, deadline: float) -> Response:
        protocol.check_headers(request.headers)
        body = await self._bodies.read(request, deadline)
        if self.waiting >= self.limits.queue:
            text = f"{self.limits.queue} requests are waiting already: send this one again later."
            raise Refused(429, text, {"Retry-After": "1"})
        self._decoding += 1
        try:
            inputs, rows = await self._decoded(body)
            answer = self._batcher.submit(inputs, rows)
        finally:
            self._decoding -= 1
        return Response(protocol.encode(await self._outputs(answer, request, deadline)), media_type=JSON)

    async def _decoded(self, body: bytes) -> tuple[dict[str, Tensor], int]:
        if len(body) < LARGE:
            return protocol.decode(body, self.engine.inputs, self.limits)
        async with self._large:  # one at a time: values take many times the memory of their text
            return await asyncio.to_thread(protocol.decode, body, self.engine.inputs, self.limits)

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
