"""profiler: reading a trace, and the verdict that follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

import forge
from forge.data import Loader
from forge.testing import fit_tiny
from forge_plugins import AMP, Compile, Prefetch, Profiler, Remat
from forge_plugins.profiler.trace import analyse
from forge_plugins.profiler.verdict import BUSY, Measured, Setup, judge, provided
from tests.support.profiler_kit import SHORT, micro, span
from tests.support.tasks import Classifier, fit

# ---------------------------------------------------------------------------------------------------------------------
# Reading a trace: one of an accelerator, written by hand, in microseconds


def one_update() -> list[dict[str, Any]]:
    """1000 µs: data to 300, an update to 900; the device copies, computes, waits and computes again until 1100."""
    return [
        span("user_annotation", "ProfilerStep#7", 0, 1000),
        span("user_annotation", "data", 100, 300),
        span("user_annotation", "update 7", 300, 900),
        span("user_annotation", "transfer", 300, 400),
        span("user_annotation", "forward", 400, 600),
        span("cpu_op", "aten::linear", 410, 500, **{"External id": 1}),
        span("cpu_op", "aten::addmm", 420, 480, **{"External id": 2}),
        span("user_annotation", "backward", 600, 800),
        span("cpu_op", "aten::mm", 610, 700, tid=2, **{"External id": 3}),
        span("cpu_op", "aten::item", 820, 880, **{"External id": 4}),
        span("cuda_runtime", "cudaStreamSynchronize", 830, 870, **{"External id": 4}),
        span("cuda_runtime", "cudaDeviceSynchronize", 1001, 1100),
        span("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 350, 450, tid=7, bytes=300),
        span("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 450, 460, tid=7, bytes=100),
        span("kernel", "gemm", 440, 540, tid=7, **{"External id": 2}),
        span("kernel", "gemm", 700, 1100, tid=7, **{"External id": 3}),
        span("gpu_user_annotation", "forward", 440, 540, tid=7),
    ]


def test_the_hosts_time_is_divided_by_phases() -> None:
    phases = {name: micro(seconds) for name, seconds in analyse(one_update(), {7: 200e-6}).phases.items()}
    assert phases == {
        "data": 200,
        "transfer": 100,
        "forward": 200,
        "backward": 200,
        "step": 0,
        "update": 100,
        "between": 200,
        "evaluation": 0,
    }


def test_the_beginning_of_an_epoch_counts_as_waiting_for_data() -> None:
    assert micro(analyse(one_update(), {7: 280e-6}).phases["data"]) == 280
    assert micro(analyse(one_update(), {7: 0.0}).phases["data"]) == 200


def test_the_devices_time_is_computing_copying_starving() -> None:
    trace = analyse(one_update(), {7: 200e-6})
    assert micro(trace.window) == 1100
    assert micro(trace.busy) == 500
    assert micro(trace.copying) == 90  # 350 to 440; beside a kernel it costs nothing
    assert micro(trace.starved) == 200
    assert (trace.copied, trace.pageable) == (400, 300)


def test_operators_have_their_own_time_and_their_kernels() -> None:
    trace = analyse(one_update(), {})
    found = {each.name: (each.calls, micro(each.cpu), micro(each.device)) for each in trace.operators}
    assert found["aten::linear"] == (1, 30, 0)
    assert found["aten::addmm"] == (1, 60, 100)
    assert found["aten::mm"] == (1, 90, 400)
    assert {each.name: each.calls for each in trace.kernels}["gemm"] == 2


def test_an_operators_work_begins_where_a_calls_own_cost_ends() -> None:
    assert micro(analyse(one_update(), {}).work) == 20 + 50 + 50  # linear, addmm, item: each less 10


# ---------------------------------------------------------------------------------------------------------------------
# The verdict, from made-up measurements


def on_cuda(**shares: float) -> Measured:
    """An update of one second on cuda."""
    return replace(Measured(device="cuda", wall=1.0, busy=0.0), **shares)


@pytest.mark.parametrize(
    ("measurements", "kind"),
    [
        (on_cuda(busy=1.0), "compute-bound"),
        (on_cuda(busy=BUSY), "compute-bound"),
        (on_cuda(busy=BUSY - 0.01), "host-bound"),
        (on_cuda(busy=BUSY - 0.01, data=0.1), "data-bound"),
        (on_cuda(busy=BUSY - 0.01, copying=0.1), "transfer-bound"),
        (on_cuda(busy=0.6, data=0.15, copying=0.05), "host-bound"),
        (on_cuda(busy=0.6, data=0.21), "data-bound"),
        (on_cuda(busy=0.6, copying=0.21), "transfer-bound"),
        (on_cuda(busy=0.5, data=0.24, copying=0.25), "transfer-bound"),
        (on_cuda(busy=0.5, data=0.25, copying=0.24), "data-bound"),
        (on_cuda(busy=0.0), "host-bound"),
        (Measured(device="cpu", wall=1.0, busy=0.51), "compute-bound"),
        (Measured(device="cpu", wall=1.0, busy=0.49), "host-bound"),
        (Measured(device="cpu", wall=1.0, busy=0.4, data=0.41), "data-bound"),
        (Measured(device="cpu", wall=1.0, busy=0.41, data=0.4), "compute-bound"),
        (Measured(device="cpu", wall=1.0, busy=0.3, data=0.3), "host-bound"),
    ],
)
def test_the_verdict_follows_from_the_measurements(measurements: Measured, kind: str) -> None:
    verdict = judge(measurements, Setup())
    assert verdict.kind == kind
    assert verdict.evidence
    assert 1 <= len(verdict.advice) <= 4


@given(
    st.sampled_from(["cpu", "cuda"]),
    st.lists(st.floats(0, 10), min_size=4, max_size=4),
    st.none() | st.floats(0, 20),
)
def test_shares_are_the_whole_whatever_is_measured(device: Any, parts: list[float], before: float | None) -> None:
    busy, data, copying, host = parts
    copying = copying if device == "cuda" else 0.0
    found = Measured(
        device=device, wall=busy + data + copying + host, busy=busy, data=data, copying=copying, unrecorded=before
    )
    assert all(0 <= share <= 1 for share in found.shares.values())
    assert sum(found.shares.values()) == pytest.approx(1 if any(found.shares.values()) else 0)
    assert found.seconds <= found.wall
    judge(found, Setup())


def test_a_plugin_counts_by_what_it_provides_or_its_name() -> None:
    class Halves(forge.Plugin):
        provides = ("autocast",)

    class Silent(forge.Plugin): ...

    second = Silent()
    second.name = "compile@second"
    assert provided([Halves(), second]) == {"autocast", "compile"}
    assert provided([AMP(dtype="bf16"), Remat(), Prefetch(), Compile()]) == {
        "autocast",
        "activation_checkpointing",
        "prefetch",
        "compile",
        "compiled_code",
    }


# ---------------------------------------------------------------------------------------------------------------------
# The verdict, from real runs


def verdict_of(task: forge.TaskModule, data: Any, active: int = 3) -> tuple[str, Profiler]:
    plugin = Profiler(wait=3, warmup=1, active=active)
    fit(task, train=data, plugins=[plugin])
    verdict = plugin.reports[0].verdict
    assert verdict is not None
    return verdict.kind, plugin


class Heavy(Dataset[Any]):
    """Each sample is worked out in Python, number by number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        total = 0
        for i in range(20_000):
            total += i % (index + 1)
        return torch.full((8,), float(total % 7)), index % 3


def test_a_heavy_dataset_is_data_bound() -> None:
    kind, plugin = verdict_of(Classifier(), Loader(Heavy(), batch_size=8))
    assert kind == "data-bound"
    assert plugin.reports[0].verdict is not None
    assert "num_workers=" in plugin.reports[0].verdict.advice[0]


def test_a_device_that_torch_does_not_record_gets_no_verdict() -> None:
    plugin = Profiler(**SHORT)
    fit_tiny([plugin])
    report = plugin.reports[0]
    bare = type(report)("mps", 3, 2, report.trace, None, None, 12)
    for told in (bare.text(), bare.markdown()):
        assert "bound" not in told
        assert "No verdict: torch's profiler does not record the device mps." in told
    assert "verdict" not in bare.plain()
