"""The server process: a socket, uvicorn on it, and an orderly end."""

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
        cure = "Choose another --host." if isinstance(error, socket.gaierror) else "Choose another --port; 0 picks one."
        if getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            cure = "Choose another --host."
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
        http=bounded_protocol(service.limits.max_connections, service.limits.header_timeout),
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
    server = StoppableServer(config, service)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(server.run_until_stopped(bound, when_ready))
    finally:
        sys.setswitchinterval(interval)
    if service.failure is not None:
        raise ExportError(
            f"The model failed on a batch of zeros: {service.failure}. If it cannot take zeros, use --no-warmup."
        )
    return not server.force_exit and service.cancelled == 0


def bounded_protocol(most: int, header_timeout: float) -> type[H11Protocol]:
    """Return the protocol of a server that has at most so many connections open, each for a bounded time.

    It is h11's, whatever else is installed: that one limits the size of headers. One connection too many is told so and
    closed, before anything of it is read. Of a connection on which nothing comes, uvicorn would wait for ever for the
    first request, and for the second one KEEP_ALIVE seconds: here it is that long for each. Once a byte has come, the
    headers must be there within `header_timeout`, however they trickle: only a request that is being answered has no
    clock here, but the application's.
    """

    class BoundedProtocol(H11Protocol):
        clock: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            if len(self.connections) > most:
                text = f"The server has {most} connections open already: use one for many requests, or try again later."
                transport.write(_refusal("503 Service Unavailable", text, "Retry-After: 1\r\n"))
                transport.close()
                return
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._set_clock()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._set_clock()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop_clock()

        def _set_clock(self) -> None:
            """Start the clock where something is left unfinished that no request waits for; stop it otherwise."""
            answering = self.cycle is not None and not self.cycle.response_complete
            begun = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
            if answering or not begun:
                self._stop_clock()
            elif self.clock is None:
                self.clock = self.loop.call_later(header_timeout, self._end)

        def _end(self) -> None:
            if self.conn.our_state is h11.IDLE:
                text = f"The headers did not come within {header_timeout:g} seconds."
                self.transport.write(_refusal("408 Request Timeout", text))
            self.transport.close()

        def _stop_clock(self) -> None:
            if self.clock is not None:
                self.clock.cancel()
                self.clock = None

    return BoundedProtocol


def _refusal(status: str, text: str, more: str = "") -> bytes:
    body = json.dumps({"error": text}).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{more}Connection: close\r\n\r\n".encode() + body


class StoppableServer(uvicorn.Server):
    """uvicorn's server; a signal ends it with exit code 0, and readiness is withdrawn at once."""

    def __init__(self, config: uvicorn.Config, service: ModelService):
        super().__init__(config)
        self._service = service

    async def run_until_stopped(self, bound: socket.socket, when_ready: Callable[[], Any]) -> None:
        watching = asyncio.create_task(self._watch(when_ready))
        try:
            await self.serve(sockets=[bound])
        finally:
            watching.cancel()

    async def _watch(self, when_ready: Callable[[], Any]) -> None:
        """Announce the server once the model is warm; end it if the model has failed."""
        await self._service.warm.wait()
        if self._service.failure is not None:
            self.should_exit = True
        elif not self.should_exit:
            when_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; uvicorn's own method would raise the signal again at the end."""
        self.force_exit = self.should_exit
        self.should_exit = self._service.stopping = True
