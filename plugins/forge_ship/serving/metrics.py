"""Metrics of a server in the format of Prometheus, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class ServerMetrics:
    """What a server counts."""

    def __init__(self, waiting: Callable[[], float], ready: Callable[[], float]):
        self.registry = here = CollectorRegistry()
        self._requests = Counter("forge_requests", "Requests to /predict by status.", ["status"], registry=here)
        self._latency = Histogram("forge_request_seconds", "From arrival to answer.", buckets=SECONDS, registry=here)
        self._rows = Histogram("forge_batch_rows", "Rows of a batch.", buckets=ROWS, registry=here)
        self._batched = Histogram("forge_batch_requests", "Requests in a batch.", buckets=ROWS, registry=here)
        self._engine = Histogram("forge_engine_seconds", "Computing one batch.", buckets=SECONDS, registry=here)
        Gauge("forge_queue_requests", "Requests that wait for the engine.", registry=here).set_function(waiting)
        ready_text = "1 if the model is warm and the server is not stopping."
        Gauge("forge_ready", ready_text, registry=here).set_function(ready)
        ProcessCollector(registry=here)

    def request(self, status: int, seconds: float) -> None:
        self._requests.labels(str(status)).inc()
        self._latency.observe(seconds)

    def batch(self, rows: int, requests: int, seconds: float) -> None:
        self._rows.observe(rows)
        self._batched.observe(requests)
        self._engine.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
