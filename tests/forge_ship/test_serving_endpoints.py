"""The endpoints of `forge serve` beside /predict: health, description, metrics."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tests.support import serving_kit
from tests.support.serving_kit import X, check_refusal, client_of, post, service_of
from tests.support.small_engines import LinearEngine

linear = serving_kit.linear
tokens = serving_kit.tokens


def test_health_and_readiness() -> None:
    engine = LinearEngine()
    with client_of(engine) as client:
        assert engine.sizes == [1, 4]  # it is warm before the first request
        assert client.get("/health").json() == {"status": "up"}
        assert client.get("/ready").json() == {"status": "ready"}
        service_of(client).stopping = True
        assert client.get("/ready").json() == {"error": "The server is stopping."}
        assert client.get("/health").status_code == 200
        assert post(client, {"x": X}).status_code == 200  # what arrives on an open connection is answered


def test_the_model_is_described(tokens: TestClient) -> None:
    described = tokens.get("/v1/model").json()
    assert described["inputs"][0] == {
        "name": "ids",
        "dtype": "int64",
        "shape": ["batch", "length"],
        "seen": {"length": [2, 6]},
    }
    assert [port["name"] for port in described["outputs"]] == ["count", "twice"]
    assert described["batching"] is True
    assert described["limits"]["max_batch"] == 4
    assert described["limits"]["max_body"] == 4096


def test_metrics_are_what_prometheus_reads() -> None:
    with client_of(LinearEngine()) as client:
        post(client, {"x": X * 3})
        post(client, {"x": 3})
        text = client.get("/metrics")
        assert text.headers["content-type"].startswith("text/plain")
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text.text)
            for sample in family.samples
        }
    assert samples["forge_requests_total", "200"] == 1
    assert samples["forge_requests_total", "400"] == 1
    assert samples["forge_request_seconds_count",] == 2
    assert samples["forge_batch_rows_count",] == 1  # the warm-up is not counted
    assert samples["forge_batch_rows_sum",] == 3
    assert samples["forge_batch_requests_sum",] == 1
    assert samples["forge_queue_requests",] == 0
    assert samples["forge_ready",] == 1
    assert samples["process_resident_memory_bytes",] > 0


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/predict", 405), ("GET", "/", 404), ("POST", "/x", 404)]
)
def test_other_addresses_name_those_there_are(linear: TestClient, method: str, path: str, status: int) -> None:
    check_refusal(linear.request(method, path), "There are POST /predict", (status,))
