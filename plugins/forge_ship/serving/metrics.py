"""Metrics of a server in the format of Prometheus, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from forge_ship.serving.limits import ServeLimits

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class ServerMetrics:
    """What a server counts."""

    def __init__(self, limits: ServeLimits, waiting: Callable[[], float], ready: Callable[[], float]):
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "forge_requests", "Requests to /predict by status.", ["status"], registry=self.registry
        )
        self._latency = Histogram(
            "forge_request_seconds", "From arrival to answer.", buckets=SECONDS, registry=self.registry
        )
        self._rows = Histogram("forge_batch_rows", "Rows of a batch.", buckets=ROWS, registry=self.registry)
        self._batched = Histogram("forge_batch_requests", "Requests in a batch.", buckets=ROWS, registry=self.registry)
        self._engine = Histogram(
            "forge_engine_seconds", "Computing one batch.", buckets=SECONDS, registry=self.registry
        )
        self._gauge("forge_queue_requests", "Requests that are read or wait for the engine.", waiting)
        self._gauge("forge_ready", "1 if the model is warm and the server is not stopping.", ready)
        self._gauge("forge_max_batch_rows", "Limit: rows of a batch.", lambda: limits.max_batch)
        self._gauge("forge_max_wait_seconds", "Limit: longest wait for a batch.", lambda: limits.max_wait)
        ProcessCollector(registry=self.registry)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(name, text, registry=self.registry).set_function(value)

    def request(self, status: int, seconds: float) -> None:
        self._requests.labels(str(status)).inc()
        self._latency.observe(seconds)

    def batch(self, rows: int, requests: int, seconds: float) -> None:
        self._rows.observe(rows)
        self._batched.observe(requests)
        self._engine.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
