"""speed_range and backends on a CUDA device; nobody looks at the times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.backends import cudnn

import forge
from forge.testing import TinyTask, tiny_batches
from forge.tuning import speed_range, step_timer
from forge_plugins import Backends
from tests.forge_plugins.test_speed_switches import Pictures, pictures

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CHUNK", 0.0), ("SECONDS", 0.0), ("SHORT_EPOCH", 0.0), ("CHUNKS", 2)):
        monkeypatch.setattr(step_timer, name, value)


def test_every_lever_of_a_gpu_is_tried() -> None:
    report = speed_range(Pictures, pictures, leave_out=["compile"], device="cuda")
    tried = {row.lever.name: row for row in report.rows if row.alone is not None}
    assert tried.keys() >= {"amp bf16", "channels_last", "cuda_graph", "cuDNN benchmark", "fused_optimizer", "prefetch"}
    assert tried["prefetch"].numbers == "bitwise"
    assert all(row.alone is not None and row.alone.memory for row in tried.values())
    assert not [row.why_not for row in report.rows if row.failed]


def test_a_step_that_reads_the_device_is_no_graph() -> None:
    class Reads(TinyTask):
        def training_step(self, batch: Any) -> Any:
            out = super().training_step(batch)
            assert float(out["loss"]) == float(out["loss"])
            return out

    report = speed_range(Reads, tiny_batches, leave_out=["compile", "kernels"], device="cuda")
    (graph,) = [row for row in report.rows if row.lever.name == "cuda_graph"]
    assert graph.failed
    assert graph.why_not


def test_switches_are_set_for_the_run_and_put_back() -> None:
    seen: list[Any] = []

    @forge.on("step_end")
    def look(step: forge.Step) -> None:
        seen.append((torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark))

    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark
    plugins = [Backends(tf32=True, cudnn_benchmark=True, attention="flash"), look]
    forge.Trainer(plugins=plugins, max_epochs=1, run_dir=False, device="cuda").fit(TinyTask(), tiny_batches())
    assert set(seen) == {("high", True, True)}
    assert (torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark) == before
