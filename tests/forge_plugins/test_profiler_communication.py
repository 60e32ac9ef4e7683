"""profiler: the time of collectives, exposed and overlapped, in traces written by hand and of real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import forge
from forge_plugins import DDP, FSDP, Profiler
from forge_plugins.profiler.communication import collectives
from tests.support.lasting_ranks import ranks
from tests.support.profiler_kit import micro, span, summary
from tests.support.profiles import some

Times = list[tuple[int, int]]
GLOO, STREAM, NCCL_STREAM = 2, 7, 20


def found(*events: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """By kind: calls, µs, and µs exposed."""
    rows = collectives(events, updates=1)
    assert all(row["overlapped"] == pytest.approx(row["time"] - row["exposed"]) for row in rows)
    return {row["name"]: (row["calls"], micro(row["time"]), micro(row["exposed"])) for row in rows}


# ---------------------------------------------------------------------------------------------------------------------
# Traces of known intervals


def on_device() -> list[dict[str, Any]]:
    """Computation to 400 and from 600; an all-reduce half beside it, an all-gather inside it, a send after both."""
    return [
        span("kernel", "gemm", 100, 400, STREAM),
        span("kernel", "gemm", 600, 900, STREAM),
        span("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 300, 500, 20),
        span("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 700, 800, 20),
        span("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 880, 950, 20),
        span("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 480, 550, STREAM),
    ]


def test_nccl_is_exposed_where_no_other_kernel_runs() -> None:
    assert found(*on_device()) == {
        "all_reduce": (1, 200, 100),
        "send_recv": (1, 70, 50),
        "all_gather": (1, 100, 0),
        "all": (3, 370, 150),
    }


def test_gloo_is_exposed_where_no_thread_computes() -> None:
    assert found(
        span("cpu_op", "aten::mm", 0, 300),
        span("cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 300, 700),
        span("cpu_op", "c10d::allreduce_", 310, 690),
        span("cpu_op", "aten::add_", 800, 850, tid=5),
        span("user_annotation", "gloo:all_reduce", 200, 900, GLOO),
        span("user_annotation", "gloo:broadcast", 850, 950, GLOO + 1),
    ) == {"all_reduce": (1, 700, 550), "broadcast": (1, 100, 100), "all": (2, 750, 600)}


INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


@given(INTERVALS, INTERVALS, INTERVALS)
def test_exposed_and_overlapped_are_sets_of_moments(reduced: Times, gathered: Times, computed: Times) -> None:
    def moments(times: Times) -> set[int]:
        return {moment for start, end in times for moment in range(start, end)}

    reduced, gathered, computed = ([(min(t), max(t)) for t in times] for times in (reduced, gathered, computed))
    told = found(
        span("kernel", "gemm", 60, 61, STREAM),
        *(span("kernel", "ncclDevKernel_AllReduce_Sum(int)", *each, NCCL_STREAM) for each in reduced),
        *(span("kernel", "ncclDevKernel_AllGather(int)", *each, NCCL_STREAM + 1) for each in gathered),
        *(span("kernel", "gemm", *each, STREAM) for each in computed),
    )
    busy = moments(computed)
    for kind, times in {"all_reduce": reduced, "all_gather": gathered, "all": [*reduced, *gathered]}.items():
        sent = moments(times)
        if times:
            assert told[kind] == (len(times), len(sent), len(sent - busy))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclSymkDevKernel_ReduceScatter_LD_Sum_f32(ncclSymkDevWorkArgs)", "reduce_scatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "generic"),
        ("gloo:all_gather", "all_gather"),
    ],
)
def test_a_collective_has_the_kind_of_its_name(name: str, kind: str) -> None:
    assert next(iter(found(span("kernel", name, 0, 1)))) == kind


# ---------------------------------------------------------------------------------------------------------------------
# Two real ranks, over gloo


class Wide(forge.TaskModule):
    """A step with gradients of 4 MB, and little else."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def profiled(folder: Path, strategy: str) -> str:
    plugin = {"ddp": DDP, "fsdp": FSDP}[strategy]()
    data = list(torch.randn(9, 8, 512, generator=torch.Generator().manual_seed(0)))
    plugins = [plugin, Profiler(wait=2, warmup=1, active=3)]
    trainer = forge.Trainer(max_epochs=1, seed=0, device="cpu", run_dir=folder, plugins=plugins)
    trainer.fit(Wide(), data)
    return plugins[1].reports[-1].text(12)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kinds"), some([("fsdp", {"all_gather"}), ("ddp", {"all_reduce"})]))
def test_two_ranks_see_their_collectives(strategy: str, kinds: set[str], tmp_path: Path) -> None:
    texts = ranks(2)(profiled, tmp_path, strategy)
    assert all("collectives" in text for text in texts)
    by_kind = {row["name"]: row for row in summary(tmp_path)["tables"]["collectives"]}
    assert kinds <= set(by_kind)
    every = by_kind.pop("all")
    assert 0 < every["time"] == pytest.approx(every["exposed"] + every["overlapped"])
    assert every["calls"] == pytest.approx(sum(each["calls"] for each in by_kind.values()))
    assert "| collectives |" in (tmp_path / "profile" / "summary.md").read_text()
