"""profiler on a CUDA device: kernels in the trace, memory by purpose, NVTX, and what is left of an OOM."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge_plugins import Profiler
from tests.support.profiler_kit import events_of, traces
from tests.support.tasks import Classifier, fit, make_batches

pytestmark = pytest.mark.gpu

SHORT: dict[str, Any] = {"wait": 3, "warmup": 2, "active": 3}


class Matmuls(forge.TaskModule):
    """Few kernels, much work in each."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))

    def training_step(self, batch: Any) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def profiled(task: forge.TaskModule, data: Any, **options: Any) -> Any:
    """The report of a fit on the device."""
    plugin = Profiler(**{**SHORT, **options.pop("profiler", {})})
    fit(task, train=data, device="cuda", plugins=[plugin, *options.pop("beside", ())], log_every=1000, **options)
    (report,) = plugin.reports
    return report


def events(folder: Path) -> list[dict[str, Any]]:
    (file,) = traces(folder)
    return events_of(file)


# ---------------------------------------------------------------------------------------------------------------------
# The trace


def test_kernels_and_copies_are_in_the_trace(tmp_path: Path) -> None:
    report = profiled(Matmuls(512), [torch.randn(256, 512) for _ in range(10)], run_dir=tmp_path)
    copied = [row["name"] for row in report.tables["kernels"] if "HtoD" in row["name"]]
    kinds = {event.get("cat") for event in events(tmp_path)}
    assert {"kernel", "gpu_memcpy", "cpu_op", "user_annotation"} <= kinds
    ranges = [event["name"] for event in events(tmp_path) if event.get("cat") == "user_annotation"]
    for name in ("data", "to_device", "forward", "backward", "optimizer"):
        assert ranges.count(name) == 3, name
    assert copied
    assert report.device.startswith("cuda:0 (")


def test_operators_have_the_time_of_their_kernels(tmp_path: Path) -> None:
    data = [torch.randn(2048, 4096, device="cuda") for _ in range(2)] * 5
    report = profiled(Matmuls(), data, run_dir=tmp_path)
    products = [row for row in report.tables["operators"] if row["name"] in ("aten::mm", "aten::addmm")]
    total = sum(row["device"] for row in report.tables["kernels"])
    assert sum(row["device"] for row in products) > total / 2
    assert sum(row["device"] for row in report.tables["operators"]) <= total * 1.001
    assert "| kernels |" in (tmp_path / "profile" / "summary.md").read_text()


def test_a_read_of_the_device_is_counted_and_named() -> None:
    class Reads(Classifier):
        def training_step(self, batch: Any) -> Any:
            outputs = super().training_step(batch)
            return {**outputs, "read": outputs["loss"].item()}

    data = [(x.cuda(), y.cuda()) for x, y in make_batches(10)]
    report = profiled(Reads(), data)
    waits = {row["name"]: row["calls"] for row in report.tables["operators"]}
    assert waits["cudaStreamSynchronize"] >= 1


# ---------------------------------------------------------------------------------------------------------------------
# Training does not notice


@pytest.fixture
def syncs_are_errors() -> Iterator[forge.Plugin]:
    """A callback that makes every host sync an error once the recording is over."""

    @forge.on("boundary")
    def strict(step: forge.Step) -> None:
        if step.index >= 8:
            torch.cuda.set_sync_debug_mode("error")

    yield strict
    torch.cuda.set_sync_debug_mode("default")


def test_nothing_waits_for_the_device_after_the_last_recording(syncs_are_errors: forge.Plugin) -> None:
    pinned = [(x.pin_memory(), y.pin_memory()) for x, y in make_batches(30)]
    report = profiled(Classifier(), pinned, max_epochs=None, max_updates=16, beside=[syncs_are_errors])
    assert report.updates == 3


def test_with_nvtx_all_updates_are_marked_and_nothing_is_recorded() -> None:
    plugin = Profiler(nvtx=True)
    marks = []

    class Looks(Classifier):
        def training_step(self, batch: Any) -> Any:
            marks.append(torch.autograd._profiler_enabled())
            return super().training_step(batch)

    fit(Looks(), train=make_batches(3), device="cuda", plugins=[plugin])
    assert marks == [True] * 3
    assert not plugin.reports
    assert not torch.autograd._profiler_enabled()


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def test_the_memory_of_the_window_is_divided_and_kept(tmp_path: Path) -> None:
    report = profiled(Matmuls(1024), [torch.randn(256, 1024)] * 10, run_dir=tmp_path, profiler={"memory": True})
    folder = tmp_path / "profile"
    (snapshot,) = folder.glob("*.memory-snapshot.pickle")
    assert snapshot.stat().st_size > 1000
    found = {row["name"]: row["bytes"] for row in report.tables["memory"]}
    assert found["weights"] == found["gradients"] == 2 * 1024 * 1024 * 4
    assert found["all"] >= sum((found["weights"], found["gradients"], 256 * 1024 * 4))
    assert any(row["bytes"] for row in report.tables["operators"])


def test_a_history_that_the_user_keeps_stays_on() -> None:
    torch.cuda.memory._record_memory_history(max_entries=1000)
    try:
        profiled(Classifier(), make_batches(10), profiler={"memory": True})
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)


class Greedy(Classifier):
    """Keeps some memory, then asks for more than there is."""

    def training_step(self, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.progress.update == 2:
            self.kept = torch.empty(300 << 20, dtype=torch.uint8, device=batch[0].device)
            torch.empty(1 << 44, dtype=torch.uint8, device=batch[0].device)
        return super().training_step(batch)


@pytest.mark.parametrize("waits", [1, 5])
def test_out_of_memory_names_the_lines_that_hold_it(waits: int, tmp_path: Path) -> None:
    plugin = Profiler(wait=waits, warmup=0, active=3)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(Greedy(), train=make_batches(8), device="cuda", plugins=[plugin], run_dir=tmp_path)
    note = "\n".join(caught.value.__notes__)
    assert "Memory of cuda:0 when it ran out (update 2, epoch 0):" in note
    assert re.search(r"activations and all else +\d+", note)
    assert re.search(r"\d+ MiB in \d blocks: \S*test_profiler_cuda\.py:\d+ in training_step", note)
    assert "-p accumulate" in note
    snapshot = tmp_path / "profile" / "rank0.out-of-memory.pickle"
    assert snapshot.stat().st_size > 1000
    assert str(snapshot) in note
    assert not torch.autograd._profiler_enabled()
    assert not torch._C._cuda_isHistoryEnabled()
