"""A real S3 server (moto's), reached through a proxy that cuts connections."""

from __future__ import annotations

import os
import shutil
import socket
import socketserver
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from forge_cluster.storage import object_storage
from tests.support.patience import PATIENCE

MOTO = os.environ.get("FORGE_MOTO_SERVER") or shutil.which("moto_server")


class Proxy(socketserver.ThreadingTCPServer):
    """Passes connections on; every `cut`-th one is closed in the middle of what the client sends."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, port: int):
        super().__init__(("127.0.0.1", 0), Passing)
        self.target, self.count, self.cut, self.cuts = port, 0, 0, 0


class Passing(socketserver.BaseRequestHandler):
    server: Proxy  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle(self) -> None:
        proxy = self.server
        proxy.count += 1
        doomed = bool(proxy.cut) and proxy.count % proxy.cut == 0
        proxy.cuts += doomed
        with socket.create_connection(("127.0.0.1", proxy.target)) as there:
            back = threading.Thread(target=_pass, args=(there, self.request, None), daemon=True)
            back.start()
            _pass(self.request, there, 300 if doomed else None)


def _pass(source: socket.socket, target: socket.socket, most: int | None) -> None:
    sent = 0
    with suppress(OSError):
        while data := source.recv(65536):
            sent += len(data)
            if most is not None and sent > most:
                target.sendall(data[: len(data) // 2])
                break
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """An S3 server with an empty bucket, behind the proxy."""
    if MOTO is None:
        pytest.skip("needs moto_server (pip install 'moto[server]'), on the path or in FORGE_MOTO_SERVER")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([MOTO, "-H", "127.0.0.1", "-p", str(port)], env=clean, **quiet)
    proxy = Proxy(port)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing-key",
        "AWS_SECRET_ACCESS_KEY": "testing-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_address[1]}",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_storage, "FIRST_PAUSE", 0.05)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # it knows the address of an earlier server
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
                urllib.request.urlopen(request, timeout=5)  # limit: it is asked again until PATIENCE ends
                break
            except OSError:
                assert time.monotonic() < deadline, "moto_server does not answer"
                time.sleep(0.1)
        yield proxy
    finally:
        proxy.shutdown()
        process.terminate()
        process.wait()
