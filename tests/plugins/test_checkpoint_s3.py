"""checkpoint.remote against a real S3 server (moto's), reached through a proxy that cuts and refuses connections."""

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
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.checkpoint import StoredCheckpoint, remote
from forge.checkpoint.remote import RemoteCheckpoints
from forge.testing import assert_same_weights
from forge_plugins import DDP
from forge_plugins.checkpoint import Checkpoint
from tests.support.ranks import launch
from tests.support.tasks import Classifier, fit, make_batches

pytestmark = pytest.mark.slow
s3fs = pytest.importorskip("s3fs", reason="needs s3fs")
MOTO = os.environ.get("FORGE_MOTO_SERVER") or shutil.which("moto_server")
PLACE = "s3://bucket/runs/first"


class Proxy(socketserver.ThreadingTCPServer):
    """Passes connections on; every `cut`-th one is closed in the middle of what the client sends."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, port: int):
        super().__init__(("127.0.0.1", 0), Passing)
        self.target, self.count, self.cut, self.cuts = port, 0, 0, 0


class Passing(socketserver.BaseRequestHandler):
    server: Proxy

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
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
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
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.05)
    s3fs.S3FileSystem.clear_instance_cache()  # it knows the address of an earlier server
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
                urllib.request.urlopen(request, timeout=5)
                break
            except OSError:
                assert time.monotonic() < deadline, "moto_server does not answer"
                time.sleep(0.1)
        yield proxy
    finally:
        proxy.shutdown()
        process.terminate()
        process.wait()


class Dropping(Classifier):
    def training_step(self, batch: Any) -> Any:
        return super().training_step((torch.nn.functional.dropout(batch[0], 0.3), batch[1]))


def train(run: Path, updates: int, url: str | None = PLACE, plugins: tuple[Any, ...] = ()) -> Classifier:
    torch.manual_seed(3)
    task = Dropping(hidden=64)
    checkpoint = Checkpoint(every="1 updates", keep=2, remote=url)
    options: dict[str, Any] = {"max_epochs": None, "max_updates": updates, "seed": 1, "resume": "auto"}
    fit(task, make_batches(4), run_dir=run, plugins=[checkpoint, *plugins], **options)
    return task


@pytest.mark.parametrize("cut", [0, 2, 3])
def test_an_empty_machine_resumes_from_s3_in_the_same_bits(server: Proxy, cut: int, tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", 5, None)
    server.cut = cut
    train(tmp_path / "one", 3)
    shutil.rmtree(tmp_path / "one")
    assert_same_weights(train(tmp_path / "two", 5), straight)
    server.cut = 0
    place = RemoteCheckpoints(PLACE)
    assert place.updates() == place.leftovers() == [4, 5]
    assert bool(server.cuts) == bool(cut)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"testing-secret" not in written
    assert b"testing-key" not in written


def test_a_bucket_that_does_not_exist_is_named(server: Proxy, tmp_path: Path) -> None:
    with pytest.raises(remote.CheckpointError, match=r"s3://nowhere/x: could not write forge-run.json"):
        train(tmp_path / "run", 1, "s3://nowhere/x")


def _as_rank(rank: int, store: Any, folder: Path, updates: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    train(folder, updates, plugins=(DDP(),))


def test_ranks_upload_together_and_one_process_goes_on(server: Proxy, tmp_path: Path) -> None:
    assert launch(2, _as_rank, tmp_path / "two", 3) == [0, 0]
    place = RemoteCheckpoints(PLACE)
    assert place.updates() == [2, 3]
    assert len(place._names("update-00000003")) == 6  # two files of each rank, the document, the manifest
    place.fetch(3, tmp_path / "fetched/update-00000003")
    StoredCheckpoint(tmp_path / "fetched/update-00000003").verify()
    shutil.rmtree(tmp_path / "two")
    train(tmp_path / "two", 4)
    assert place.updates() == [3, 4]
