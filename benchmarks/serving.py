"""Serving: requests per second and latency of `forge serve`, with micro-batching and one request at a time.

    python -m benchmarks.serving                       # the built-in CNN, 32 clients, 2,000 requests an arm, 2 minutes
    python -m benchmarks.serving runs/fashion_cnn/A    # a run, or an exported file
    python -m benchmarks.serving --json                # one JSON object per line: the machine, then the rows

"batcher" submits requests to the batcher itself, in one process; its rows compare `--max-batch 32` with
`--max-batch 1`. "http" is a server process, loaded by 32 clients in threads of another one, each with a connection that
stays open: the next request is sent when the answer is there. Both arms of a comparison run in turns, round after
round, so that drift of the machine affects both alike; figures are over all rounds. Memory is the server's resident set
after the first round and after the last.

What batches gain is a property of the model and the machine: little for convolutions in one thread of a CPU, which are
as busy with one row as with many; much where one row leaves the processor idle (a GPU, wide linear layers, or several
threads that wait for each other after each operator, above all on a busy machine).
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles

import torch
from rich.table import Table
from torch import Tensor, nn

from benchmarks import machine
from forge_ship.engine import Engine, Port
from forge_ship.serving.batcher import Batcher
from forge_ship.serving.limits import ServeLimits
from forge_ship.serving.protocol import JSON

ARMS = {"micro-batching": 32, "one by one": 1}
"""Name → --max-batch; the last is the base."""
SERVE = "from benchmarks.serving import serve_builtin; serve_builtin({rows}, {threads})"


class SmallCNN:
    """The engine that is measured where no model is given: 28 × 28 pixels to 10 classes, about 20,000 parameters."""

    inputs: Sequence[Port] = (Port("images", "float32", ("batch", 1, 28, 28)),)
    outputs: Sequence[Port] = (Port("logits", "float32", ("batch", 10)),)
    format = "eager"

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for inside, outside in ((1, 8), (8, 16), (16, 32)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)]
        self.model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 10)).eval()

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"logits": self.model(inputs["images"])}


@dataclass(slots=True)
class ServingRow:
    """One arm of one measurement."""

    where: str
    arm: str
    requests: int
    errors: int
    per_second: float
    factor: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    mean_batch: float
    memory_before_mib: float | None = None
    memory_after_mib: float | None = None


@dataclass(slots=True)
class Load:
    """What was measured of one arm, over all rounds."""

    latencies: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    errors: int = 0
    rows: int = 0
    batches: int = 0
    memory: list[float] = field(default_factory=list)

    def row(self, where: str, arm: str, base: Load) -> ServingRow:
        cuts = quantiles(self.latencies, n=100, method="inclusive")
        # requests of a round are equal in number: the ratio of its times is the factor
        factor = median(theirs / own for own, theirs in zip(self.seconds, base.seconds, strict=True))
        return ServingRow(
            where=where,
            arm=arm,
            requests=len(self.latencies),
            errors=self.errors,
            per_second=round(len(self.latencies) / sum(self.seconds), 1),
            factor=round(factor, 2),
            p50_ms=round(cuts[49] * 1000, 2),
            p95_ms=round(cuts[94] * 1000, 2),
            p99_ms=round(cuts[98] * 1000, 2),
            mean_batch=round(self.rows / max(1, self.batches), 1),
            memory_before_mib=self.memory[0] if self.memory else None,
            memory_after_mib=self.memory[-1] if self.memory else None,
        )


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = batcher_rows(_engine(options.model), options.requests, options.rounds)
    rows += http_rows(options.model, options.clients, options.requests, options.rounds)
    machine.show(rows, lambda rows: table(rows, options), options.json, width=130)
    return 1 if any(row.errors for row in rows) else 0


# ---------------------------------------------------------------------------------------------------------------------
# The batcher alone


def batcher_rows(engine: Engine, requests: int, rounds: int) -> list[ServingRow]:
    """Measure the batcher in this process: all requests of a round wait in it from the start."""
    loads = {arm: Load() for arm in ARMS}
    sample = sample_of(engine.inputs)
    with torch.inference_mode():
        for turn in range(-1, rounds):
            for arm, rows in ARMS.items():
                load = loads[arm] if turn >= 0 else Load()  # a round that warms up is not counted
                asyncio.run(_submit_all(engine, rows, sample, max(1, requests // rounds), load))
    return [load.row("batcher", arm, loads["one by one"]) for arm, load in loads.items()]


async def _submit_all(engine: Engine, rows: int, sample: dict[str, Tensor], count: int, load: Load) -> None:
    def observe(batch: int, requests: int, seconds: float) -> None:
        load.rows += batch
        load.batches += 1

    batcher = Batcher(engine, rows, 0.002, observe)
    start = time.perf_counter()
    answers = [batcher.submit(sample, 1) for _ in range(count)]
    for answer in answers:
        answer.add_done_callback(lambda _: load.latencies.append(time.perf_counter() - start))
    await asyncio.gather(*answers)
    load.seconds.append(time.perf_counter() - start)
    batcher.close()


# ---------------------------------------------------------------------------------------------------------------------
# Server and clients


def http_rows(model: str | None, clients: int, requests: int, rounds: int) -> list[ServingRow]:
    loads = {arm: Load() for arm in ARMS}
    with ExitStack() as stack:
        ports = {arm: stack.enter_context(_server(model, rows)) for arm, rows in ARMS.items()}
        for turn in range(-1, rounds):
            for arm, port in ports.items():
                load = loads[arm] if turn >= 0 else Load()
                before = metrics_of(port)
                _load_from_another_process(port, clients, max(1, requests // rounds), load)
                after = metrics_of(port)
                load.rows += int(after["forge_batch_rows_sum"] - before["forge_batch_rows_sum"])
                load.batches += int(after["forge_batch_rows_count"] - before["forge_batch_rows_count"])
                load.memory.append(round(after["process_resident_memory_bytes"] / 2**20, 1))
    return [load.row("http", arm, loads["one by one"]) for arm, load in loads.items()]


@contextmanager
def _server(model: str | None, rows: int) -> Iterator[int]:
    """Start a server process, and return its port."""
    threads = torch.get_num_threads()
    words = ["-c", SERVE.format(rows=rows, threads=threads)]
    if model is not None:
        words = ["-m", "forge", "serve", model, "--port", "0", "--max-batch", str(rows), "--threads", str(threads)]
    command = [sys.executable, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r":(\d+): batches", line)
            if found is None:
                raise RuntimeError(f"the server did not start: {line}")
            yield int(found[1])
        finally:
            process.terminate()


def serve_builtin(rows: int, threads: int) -> None:
    """Serve the built-in engine as `forge serve` does."""
    from forge_ship.serving.http_answers import make_app
    from forge_ship.serving.server_process import address_of, listen, serve

    torch.set_num_threads(threads)
    bound = listen("127.0.0.1", 0)
    app = make_app(SmallCNN(), ServeLimits(max_batch=rows), name="built-in")
    serve(app, bound, lambda: print(f"Serving at {address_of(bound)}: batches of up to {rows}", flush=True))


def _load_from_another_process(port: int, clients: int, count: int, load: Load) -> None:
    """Send requests from a process of its own, which does not take the time of the server's or of this one."""
    described = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/model"))
    ports = [Port(one["name"], one["dtype"], tuple(one["shape"]), one["seen"]) for one in described["inputs"]]
    body = json.dumps({name: tensor.tolist() for name, tensor in sample_of(ports).items()}).encode()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        seconds, latencies, errors = pool.apply(send_load, (port, body, clients, count))
    load.seconds.append(seconds)
    load.latencies += latencies
    load.errors += errors


def send_load(port: int, body: bytes, clients: int, count: int) -> tuple[float, list[float], int]:
    """Send `count` requests from `clients` threads; return the seconds, the latencies and the number of errors."""
    latencies: list[float] = []
    errors: list[int] = []
    left = iter(range(count))
    lock = threading.Lock()
    start_line = threading.Barrier(clients + 1)

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        start_line.wait()
        while True:
            with lock:
                if next(left, None) is None:
                    break
            begin = time.perf_counter()
            try:
                connection.request("POST", "/predict", body, {"Content-Type": JSON})
                answer = connection.getresponse()
                answer.read()
                errors.extend([1] * (answer.status != 200))
            except (OSError, http.client.HTTPException):
                errors.append(1)
                connection.close()
            latencies.append(time.perf_counter() - begin)
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    start_line.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start, latencies, len(errors)


def metrics_of(port: int) -> dict[str, float]:
    """Return the samples without labels of /metrics."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, flags=re.MULTILINE)}


# ---------------------------------------------------------------------------------------------------------------------


def sample_of(ports: Sequence[Port]) -> dict[str, Tensor]:
    """Return one row for a model's inputs: normal numbers, or zeros for other dtypes."""
    made: dict[str, Tensor] = {}
    for port in ports:
        seen = port.seen or {}
        sizes = [
            1 if size == "batch" else seen.get(size, (1, 1))[1] if isinstance(size, str) else size
            for size in port.shape
        ]
        dtype = getattr(torch, port.dtype)
        made[port.name] = torch.randn(sizes).to(dtype) if dtype.is_floating_point else torch.zeros(sizes, dtype=dtype)
    return made


def _engine(model: str | None) -> Engine:
    if model is None:
        return SmallCNN()
    from forge_ship.open_engine import open_engine

    open_model: Callable[..., Engine] = open_engine
    return open_model(model)


def table(rows: list[ServingRow], options: argparse.Namespace) -> Table:
    name = options.model or "the built-in CNN"
    shown = Table(
        title=f"serving {name}: {options.clients} clients, {options.threads} threads, {options.rounds} rounds in turns"
    )
    for heading in ("where", "arm"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("requests", "errors", "per s", "factor", "p50 ms", "p95 ms", "p99 ms", "batch", "MiB"):
        shown.add_column(heading, justify="right")
    for row in rows:
        memory = f"{row.memory_before_mib:.0f} → {row.memory_after_mib:.0f}" if row.memory_after_mib else ""
        times = (f"{row.p50_ms:.1f}", f"{row.p95_ms:.1f}", f"{row.p99_ms:.1f}") if row.where != "batcher" else ("",) * 3
        figures = (str(row.requests), str(row.errors), f"{row.per_second:,.0f}", f"{row.factor:.2f}×")
        shown.add_row(row.where, row.arm, *figures, *times, f"{row.mean_batch:.1f}", memory)
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", metavar="RUN|FILE", nargs="?", help="what is served (default: a small CNN)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    parser.add_argument("--clients", type=int, default=32, help="clients at once (default 32)")
    parser.add_argument("--requests", type=int, default=2000, help="requests of each arm (default 2000)")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="threads of torch's operators (default: torch's)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds, in turns (default 5)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
