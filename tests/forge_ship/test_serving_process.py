"""`forge serve` as a process: its lines, its signals, its exit codes."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forge import cli
from forge_ship.commands.serve import parser
from forge_ship.serving import server_process
from tests.conftest import PLAIN, REPO
from tests.support import forked
from tests.support.patience import PATIENCE
from tests.support.small_engines import LinearEngine

PROGRAM = f"""
import os, sys, time, types
from pathlib import Path
sys.path.insert(0, {str(REPO)!r})
from forge.cli import main
from tests.support.small_engines import LinearEngine

class Slow(LinearEngine):
    def __call__(self, inputs):
        while Path(GATE).exists():  # closed
            time.sleep(0.01)
        return super().__call__(inputs)

engines = types.ModuleType("forge_ship.open_engine")
GATE = os.environ.get("GATE", "")
engines.open_engine = lambda path, **options: Slow() if GATE else LinearEngine()
sys.modules[engines.__name__] = engines
sys.exit(main(["serve", "model.onnx", "--port", "0", "--max-batch", "1", *sys.argv[1:]]))
"""
BODY = json.dumps({"x": [[1.0, 2.0, 3.0, 4.0]]})


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-c", PROGRAM, *words]
    environment = {**os.environ, **PLAIN}
    pipe = subprocess.PIPE
    with forked.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"Serving model.onnx at http://127.0.0.1:(\d+): batches of up to 1 rows", line)
            assert found, line + (process.stderr.read() if process.stderr and not line else "")
            yield process, int(found[1])
        finally:
            process.kill()


def request(port: int, method: str, path: str, body: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_sigterm_answers_what_is_in_flight_and_exits_with_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    gate = tmp_path / "closed"
    monkeypatch.setenv("GATE", str(gate))
    with serving() as (process, port):
        assert request(port, "GET", "/ready")[0] == 200
        gate.touch()
        ask = [
            threading.Thread(target=lambda: statuses.append(request(port, "POST", "/predict", BODY)[0]))
            for _ in range(3)
        ]
        for thread in ask:
            thread.start()
        while "forge_queue_requests 2.0" not in request(port, "GET", "/metrics")[1]:
            assert statuses == []
        process.send_signal(signal.SIGTERM)
        gate.unlink()
        for thread in ask:
            thread.join(PATIENCE)
        _, errors = process.communicate(timeout=PATIENCE)
        assert statuses == [200, 200, 200]
        assert process.returncode == 0, errors
        assert errors.strip() == "stopped"
        with pytest.raises(OSError, match="refused"):
            request(port, "GET", "/health")


def test_those_who_send_slowly_or_nothing_make_room_for_others() -> None:
    with serving("--max-connections", "3") as (_, port):
        held = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(3)]
        held[1].sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\n")
        held[2].sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        others: list[socket.socket] = []
        for _ in held:
            assert request(port, "GET", "/health")[0] == 200
            others.append(socket.create_connection(("127.0.0.1", port), 30))
        answers = [connection.makefile("rb").read() for connection in held]  # to the end: the server closes them
        assert [answer[:12] for answer in answers] == [b"", b"HTTP/1.1 408", b"HTTP/1.1 415"]


# ---------------------------------------------------------------------------------------------------------------------
# The command, in this process


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the engine that the command opens; the list has what it was asked for."""
    asked: list[Any] = []
    module = types.ModuleType("forge_ship.open_engine")

    def open_engine(path: str, **options: Any) -> LinearEngine:
        asked.append((path, options))
        return LinearEngine()

    module.__dict__["open_engine"] = open_engine
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return asked


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Serve nothing; the list has the limits that were asked for."""
    limits: list[Any] = []

    def serve(app: Any, bound: Any, when_ready: Any) -> bool:
        limits.append(app.state.service.limits)
        when_ready()
        return True

    monkeypatch.setattr(server_process, "serve", serve)
    return limits


def test_the_options_reach_the_engine_and_the_limits(
    opened: list[Any], served: list[Any], empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "a.py").write_text("import forge\n\nclass A(forge.TaskModule): ...\n\ndef data(): ...\n")
    words = ["--port", "0", "--device", "cpu", "--task", "a.py:A", "--data", "a.py", "--weights", "ema"]
    words += ["--max-batch", "8", "--max-wait", "5", "--max-body", "0.5", "--queue", "9", "--max-connections", "5"]
    assert cli.main(["serve", "runs/a", *words, "--timeout", "3", "--max-axis", "length=7"]) == 0
    ((model, given),) = opened
    assert (model, given["device"], given["weights"]) == ("runs/a", "cpu", "ema")
    assert (given["task"].__name__, given["data"].__name__) == ("A", "data")
    (limits,) = served
    assert (limits.max_batch, limits.max_wait, limits.max_body, limits.queue) == (8, 0.005, 512 * 1024, 9)
    assert (limits.timeout, limits.max_axes, limits.max_connections) == (3.0, {"length": 7}, 5)
    assert re.match(
        r"Serving runs/a at http://127\.0\.0\.1:\d+: batches of up to 8 rows, waiting at most 5 ms\n",
        capsys.readouterr().out,
    )


def test_a_taken_port_is_named(opened: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "a.pt2", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"Cannot listen on 127.0.0.1, port {port}" in error
    assert "Choose another --port; 0 picks one." in error
    assert opened == []  # a model that takes a minute to load is not loaded first


def test_a_model_that_fails_on_zeros_ends_the_server(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LinearEngine, "__call__", lambda self, inputs: 1 / 0)
    assert cli.main(["serve", "a.pt2", "--port", "0"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "The model failed on a batch of zeros: ZeroDivisionError: division by zero" in error
    assert "--no-warmup" in error


def test_a_missing_package_is_named_with_the_pip_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "forge_ship.serving.http_answers", None)
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert cli.main(["serve", "a.pt2"]) == 2
    assert "pip install 'forge-trainer[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "--max-batch 0",
        "--max-wait -1",
        "--port 70000",
        "--queue x",
        "--max-axis length",
        "--timeout 0",
        "--max-wait nan",
    ],
)
def test_options_out_of_range_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["a.pt2", *words.split()])
    assert "must be" in capsys.readouterr().err
