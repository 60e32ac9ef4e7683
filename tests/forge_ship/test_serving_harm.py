"""`forge serve` against those who hold connections, call it by other names, or look around."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from uvicorn.server import ServerState

from forge import cli
from forge_ship.serving.limits import ServeLimits
from forge_ship.serving.server_process import bounded_protocol
from tests.forge_ship.test_serving_process import serving
from tests.support.serving_kit import in_a_loop
from tests.support.small_engines import LinearEngine

# -- connections ------------------------------------------------------------------------------------------------------


class Wire(asyncio.Transport):
    """A connection of which the test is the other end."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


async def answers(scope: Any, receive: Any, send: Any) -> None:
    """Answer without reading the body."""
    await PlainTextResponse("ok")(scope, receive, send)


async def waits(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.Event().wait()


def connected(app: Any) -> tuple[Any, Wire]:
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
    config.load()
    protocol = bounded_protocol(ServeLimits())(config, ServerState(), {}, asyncio.get_running_loop())
    wire = Wire()
    protocol.connection_made(wire)
    return protocol, wire


@in_a_loop
async def test_headers_that_trickle_have_one_deadline() -> None:
    protocol, wire = connected(answers)
    assert protocol.clock is None  # nothing came yet: the connection is idle
    protocol.data_received(b"G")
    clock: Any = protocol.clock
    for sign in b"ET /health HTTP/1.1\r\nHost: a\r\nX-A: " + b"b" * 100:
        protocol.data_received(bytes([sign]))
        assert protocol.clock is clock
    clock._run()
    assert wire.closed
    assert wire.written.startswith(b"HTTP/1.1 408 Request Timeout\r\n")


@in_a_loop
async def test_headers_that_are_complete_stop_the_clock() -> None:
    protocol, wire = connected(waits)
    protocol.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n")
    clock: Any = protocol.clock
    protocol.data_received(b"\r\n")
    assert clock.cancelled()
    assert protocol.clock is None  # from here on it is the application's time
    assert not wire.closed


@in_a_loop
async def test_a_body_that_trickles_after_its_answer_has_a_deadline() -> None:
    protocol, wire = connected(answers)
    protocol.data_received(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
    while b"ok" not in wire.written:
        await asyncio.sleep(0)
    clock: Any = protocol.clock
    assert clock is not None
    protocol.data_received(b"b")
    assert protocol.clock is clock
    clock._run()
    assert wire.closed
    assert b"408" not in wire.written  # it has its answer


@in_a_loop
async def test_a_second_request_has_its_own_deadline() -> None:
    protocol, wire = connected(answers)
    protocol.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HT")
    while b"ok" not in wire.written or protocol.clock is None:
        await asyncio.sleep(0)
    clock: Any = protocol.clock
    protocol.data_received(b"TP/1.1\r\nHost: a\r\n\r\n")
    assert clock.cancelled()
    while wire.written.count(b"ok") < 2:
        await asyncio.sleep(0)
    assert protocol.clock is None


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "names", "refused"),
    [
        ((), ["localhost", "127.0.0.1:{port}", "[::1]"], "rebound.example"),
        (
            ("--host-header", "a.example,*.b.example", "--host-header", "c.example"),
            ["a.example", "x.b.example", "c.example"],
            "localhost",
        ),
    ],
)
def test_a_local_server_has_local_names_or_those_that_it_was_given(
    words: tuple[str, ...], names: list[str], refused: str
) -> None:
    with serving(*words) as (_, port):
        for host, status in {**dict.fromkeys(names, b"200"), refused: b"400"}.items():
            with socket.create_connection(("127.0.0.1", port), 30) as connection:
                head = f"GET /health HTTP/1.1\r\nHost: {host.format(port=port)}\r\nConnection: close\r\n\r\n"
                connection.sendall(head.encode())
                assert connection.makefile("rb").readline().split()[1] == status, host


def test_the_model_is_named_without_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("forge_ship.open_engine.open_engine", lambda path, **_: LinearEngine())

    def serve(app: Any, bound: Any, when_ready: Any) -> bool:
        with TestClient(app, base_url="http://localhost") as client:
            shown.append(client.get("/v1/model").text)
        return True

    monkeypatch.setattr("forge_ship.serving.server_process.serve", serve)
    (tmp_path / "secret" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "secret" / "run")
    for model in (str(tmp_path / "secret" / "run"), f"{tmp_path}/secret/run/", ".", f"{tmp_path}/secret/run/../run"):
        assert cli.main(["serve", model, "--port", "0"]) == 0
        assert json.loads(shown[-1])["model"] == "run"
        assert "secret" not in shown[-1]
