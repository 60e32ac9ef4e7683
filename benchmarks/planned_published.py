"""Published training speeds and memory of Llama 3 beside what `forge plan --cluster` predicts for them.

    python -m benchmarks.planned --published            # a minute: rehearses 8B, 70B and 405B on tensors without values
    python -m benchmarks.planned --published --json

Sources, both in torchtitan's repository: benchmarks/llama3_h100_202412_torchtitan.md (December 2024; tables 1 to 5) and
benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md (June 2025). Their H100s have 96 GB of HBM2e at 2.4 TB/s and a
power limit of 500 W; links are 450 GB/s of NVLink and 400 Gb/s of network per GPU. The memory is what torch reserved,
which is more than it allocated. Computation is scaled once, by the first row; every other row is a prediction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from forge.config.recipe import load_recipe
from forge.planning.cluster import (
    Cluster,
    Layout,
    Link,
    Model,
    Variant,
    Workload,
    count_workload,
    load_cluster,
    memory_of,
)

LENGTH = 8192


@dataclass(frozen=True, slots=True)
class Published:
    """One row of a source."""

    task: str
    what: str
    gpus: int
    batch: int
    layout: dict[str, Any]
    tokens: float
    "Tokens per second and GPU."
    gib: float | None
    compiled: bool = True
    fp8: bool = False
    selective: bool = False
    "Half of the activations are recomputed: between no remat and all of it."


def _fsdp(shard: int, **more: Any) -> dict[str, Any]:
    return {"data": "fsdp", "shard": shard, **more}


ROWS = [
    Published("Llama3_8B", "fsdp 8", 8, 16, _fsdp(8), 5762, 82.4, compiled=False, selective=True),
    Published("Llama3_8B", "fsdp 8, compiled", 8, 16, _fsdp(8), 6667, 77.0, selective=True),
    Published("Llama3_8B", "fsdp 8, compiled, float8", 8, 16, _fsdp(8), 8532, 76.8, fp8=True, selective=True),
    Published("Llama3_8B", "fsdp 128", 128, 256, _fsdp(128), 5605, 67.0, compiled=False, selective=True),
    Published("Llama3_8B", "fsdp 128, compiled", 128, 256, _fsdp(128), 6514, 62.0, selective=True),
    Published("Llama3_8B", "fsdp 128, compiled, float8", 128, 256, _fsdp(128), 8380, 61.8, fp8=True, selective=True),
    Published("Llama3_8B", "fsdp 8, tp 8, compiled", 64, 96, _fsdp(8, tensor=8), 4378, None, selective=True),
    Published("Llama3_70B", "fsdp 32, tp 8, compiled", 256, 512, _fsdp(32, tensor=8), 597.3, None),
    Published("Llama3_70B", "fsdp 32, tp 8, compiled, float8", 256, 512, _fsdp(32, tensor=8), 829, 71.9, fp8=True),
    Published(
        "Llama3_405B",
        "fsdp 8, tp 8, pp 8 1F1B, float8",
        512,
        256,
        _fsdp(8, tensor=8, pipeline=8, schedule="1F1B", micros=32),
        100,
        82.5,
        fp8=True,
    ),
    Published(
        "Llama3_405B",
        "fsdp 8, tp 8, pp 8 interleaved, float8",
        512,
        256,
        _fsdp(8, tensor=8, pipeline=8, schedule="Interleaved1F1B", micros=32),
        128,
        72.7,
        fp8=True,
    ),
]


@dataclass(frozen=True, slots=True)
class Compared:
    task: str
    what: str
    gpus: int
    tokens: float
    by_data_sheet: float
    "Predicted without any calibration."
    predicted: float
    "Predicted with computation scaled by the first row."
    ratio: float
    gib: float | None
    predicted_gib: float
    memory_ratio: float | None


def cluster_of(gpus: int) -> Cluster:
    """Return the machines of the sources."""
    h100 = load_cluster(f"h100x{max(1, gpus // 8)}")
    return replace(h100, memory=95 * 2**30, memory_bandwidth=2.4e12, within=Link(450e9, 3e-6), between=Link(50e9, 1e-5))


def workloads() -> dict[str, Workload]:
    """Rehearse the three models, in bf16."""
    import benchmarks.llama as llama

    found = {}
    for name in dict.fromkeys(row.task for row in ROWS):
        recipe = load_recipe("default", ["data.batch_size=4"], [], [], task=getattr(llama, name), data=llama.data)
        found[name] = count_workload(recipe, ("fp32", "bf16"))
    return found


def tokens_of(row: Published, work: Workload, scale: float) -> tuple[float, float]:
    """Return tokens per second and GPU, and the memory of a GPU."""
    work = replace(work, batch=row.batch, compiled=row.compiled)
    seconds, memory = [], []
    for remat in (False, True) if row.selective else (True,):
        layout = Layout(variant=Variant("bf16", remat), **row.layout)
        seconds.append(Model(work, cluster_of(row.gpus), scale, row.fp8).time(layout, simulated=True).total)
        memory.append(memory_of(work, layout))
    mean = sum(seconds) / len(seconds)
    return row.batch * LENGTH / mean / row.gpus, sum(memory) / len(memory)


def compared(works: dict[str, Workload] | None = None) -> Iterator[Compared]:
    works = works or workloads()
    first = ROWS[0]
    plain, scale = tokens_of(first, works[first.task], 1.0)[0], 1.0
    for _ in range(8):  # communication is not scaled, so a few rounds are needed
        scale *= tokens_of(first, works[first.task], scale)[0] / first.tokens
    assert plain > 0
    for row in ROWS:
        sheet, memory = tokens_of(row, works[row.task], 1.0)
        predicted, _ = tokens_of(row, works[row.task], scale)
        gib = memory / 2**30
        yield Compared(
            row.task,
            row.what,
            row.gpus,
            row.tokens,
            round(sheet, 1),
            round(predicted, 1),
            round(predicted / row.tokens, 3),
            row.gib,
            round(gib, 1),
            None if row.gib is None else round(gib / row.gib, 3),
        )


def lines(works: dict[str, Workload] | None = None) -> Iterator[dict[str, Any]]:
    for row in compared(works):
        yield asdict(row)
