"""The process of a server: a socket, a model that is warm before it listens, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from forge.errors import ForgeError
from forge_ship.engine import ExportError
from forge_ship.serving.http_answers import ModelService
from forge_ship.serving.limits import ServeLimits
from forge_ship.serving.protocol import JSON

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open. Proxies keep theirs for 60; the end that closes first must be theirs."""
SWITCH = 0.0005
"""Seconds after which Python lets another thread run. With its default of 0.005 an engine in Python waits that long
for the thread that reads requests, after each of its operators."""


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket; port 0 picks a free one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        is_host = isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        cure = "Choose another --host." if is_host else "Choose another --port; 0 picks one."
        raise ForgeError(f"Cannot listen on {host}, port {port}: {error}. {cure}") from error
    return bound


def address_of(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: Starlette, bound: socket.socket, when_ready: Callable[[], Any] = lambda: None) -> bool:
    """Serve until SIGTERM or SIGINT; then stop accepting, answer what is in flight, and return whether all of it was.

    A second signal ends at once. Raise ExportError if the model cannot compute its first batch.
    """
    service: ModelService = app.state.service
    config = uvicorn.Config(
        app,
        http=bounded_protocol(service.limits),
        lifespan="on",
        ws="none",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(service.limits.timeout),
    )
    server = StoppableServer(config, service, when_ready)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(server.serve(sockets=[bound]))
    finally:
        sys.setswitchinterval(interval)
    if service.failure is not None:
        raise ExportError(
            f"The model failed on a batch of zeros: {service.failure}. If it cannot take zeros, use --no-warmup."
        )
    return not server.force_exit and service.cancelled == 0


def bounded_protocol(limits: ServeLimits) -> type[H11Protocol]:
    """Return the protocol of a server that has a bounded number of connections open, each for a bounded time.

    It is h11's, whatever else is installed: that one limits the size of headers. A clock runs while a client owes the
    rest of something, headers or a body, however they trickle; uvicorn has none. Where all connections are taken, the
    one that has waited for its client for the longest gives its place to the newcomer: so nobody who sends slowly, or
    nothing, keeps others out. Only where all of them are being answered, the newcomer is told so.
    """
    silent: dict[Any, None] = {}
    "Connections whose client is to send something, the longest first."

    class BoundedProtocol(H11Protocol):
        clock: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            if len(self.connections) > limits.max_connections:
                if not silent:
                    text = f"The server answers {limits.max_connections} connections already."
                    self.refuse("503 Service Unavailable", text)
                    return
                next(iter(silent)).refuse("408 Request Timeout", "Others needed the place of this slow request.")
            silent[self] = None
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._forget()

        def _look(self) -> None:
            """Start or stop the clock, by whose turn it is."""
            is_answered = self.cycle is None or self.cycle.response_complete
            begun = self.conn.their_state is h11.SEND_BODY or (is_answered and bool(self.conn.trailing_data[0]))
            if not begun and not is_answered:
                self._forget()
                return
            silent.setdefault(self)
            if begun and self.clock is None:
                text = f"The request did not come within {limits.timeout:g} seconds."
                self.clock = self.loop.call_later(limits.timeout, self.refuse, "408 Request Timeout", text)
            elif not begun:
                self._stop_clock()

        def _forget(self) -> None:
            silent.pop(self, None)
            self._stop_clock()

        def _stop_clock(self) -> None:
            if self.clock is not None:
                self.clock.cancel()
                self.clock = None

        def refuse(self, status: str, text: str) -> None:
            """Close the connection, saying why unless it is idle, or an answer has begun."""
            is_idle = self.clock is None and self in silent
            self._forget()
            if not is_idle and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                body = json.dumps({"error": f"{text} Send it again later."}).encode()
                head = f"HTTP/1.1 {status}\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\nRetry-After: 1\r\n"
                self.transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)
            self.transport.close()

    return BoundedProtocol


class StoppableServer(uvicorn.Server):
    """uvicorn's server; a signal ends it with exit code 0, and readiness is withdrawn at once."""

    def __init__(self, config: uvicorn.Config, service: ModelService, when_ready: Callable[[], Any]):
        super().__init__(config)
        self._service, self._when_ready = service, when_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Announce the server once the model is warm; end it if the model has failed."""
        await super().startup(sockets)
        if self._service.failure is not None:
            self.should_exit = True
        elif not self.should_exit:
            self._when_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; uvicorn's own method would raise the signal again at the end."""
        self.force_exit = self.should_exit
        self.should_exit = self._service.stopping = True
