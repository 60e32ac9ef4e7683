"""Published training speeds and memory of Llama 3 beside what `forge plan --cluster` predicts for them.

    python -m benchmarks.planned --published            # 4 minutes: runs dry the models on tensors without values
    python -m benchmarks.planned --published --json

Sources, both in torchtitan's repository: benchmarks/llama3_h100_202412_torchtitan.md (December 2024; tables 1 to 6) and
benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md (June 2025). Their H100s have 96 GB of HBM2e at 2.4 TB/s and a
power limit of 500 W; links are 450 GB/s of NVLink and 400 Gb/s of network per GPU. Computation is scaled once, by the
first row; every other row is a prediction.

What they ran, by torchtitan's code of December 2024: float32 parameters and AdamW, bfloat16 products, gradients reduced
in float32; selective checkpointing `op` (attention and every second matrix product of a block are kept) or blocks
recomputed whole; tensor parallelism with norms by positions and a loss divided by classes; pipelines that keep
parameters gathered and have as many micro-batches as ranks, the default, since the tables name none. The memory is
`reserved_bytes.all.peak` of the fullest GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from forge.config.recipe import load_recipe
from forge_cluster.planning import (
    Cluster,
    Layout,
    Link,
    Model,
    Variant,
    Workload,
    count_workload,
    load_cluster,
    reserved_of,
)


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
    remat: bool = False
    "Whether blocks are recomputed whole. The selective rule is in the task."
    length: int = 8192


def _fsdp(shard: int, **more: Any) -> dict[str, Any]:
    divided = {"sequence": True, "split_loss": True} if "tensor" in more else {}
    return {"data": "fsdp", "shard": shard, **divided, **more}


def _piped(schedule: str) -> dict[str, Any]:
    return _fsdp(8, tensor=8, pipeline=8, schedule=schedule, micros=8, torchtitan=True)


SELECTIVE, COMPILED = "Llama3_8BSelective", "Llama3_8BSelectiveCompiled"
LONG = {"remat": True, "length": 32768}
ROWS = [
    Published(SELECTIVE, "8B, fsdp 8", 8, 16, _fsdp(8), 5762, 82.4, compiled=False),
    Published(COMPILED, "8B, fsdp 8, compiled", 8, 16, _fsdp(8), 6667, 77.0),
    Published(COMPILED, "8B, fsdp 8, compiled, float8", 8, 16, _fsdp(8), 8532, 76.8, fp8=True),
    Published("Llama3_8B", "8B, fsdp 8, 32k tokens, float8", 8, 8, _fsdp(8), 3890, 83.9, fp8=True, **LONG),
    Published(SELECTIVE, "8B, fsdp 128", 128, 256, _fsdp(128), 5605, 67.0, compiled=False),
    Published(COMPILED, "8B, fsdp 128, compiled", 128, 256, _fsdp(128), 6514, 62.0),
    Published(COMPILED, "8B, fsdp 128, compiled, float8", 128, 256, _fsdp(128), 8380, 61.8, fp8=True),
    Published(COMPILED, "8B, fsdp 8, tp 8, compiled", 64, 96, _fsdp(8, tensor=8), 4378, None),
    Published("Llama3_70B", "70B, fsdp 32, tp 8", 256, 512, _fsdp(32, tensor=8), 597.3, None, remat=True),
    Published("Llama3_70B", "70B, fsdp 32, tp 8, float8", 256, 512, _fsdp(32, tensor=8), 829, 71.9, True, True, True),
    Published("Llama3_405B", "405B, fsdp 8, tp 8, pp 8 1F1B", 512, 256, _piped("1F1B"), 100, 82.5, True, True, True),
    Published(
        "Llama3_405B", "405B, same, interleaved", 512, 256, _piped("Interleaved1F1B"), 128, 72.7, True, True, True
    ),
    Published("Llama3_405B", "405B, 1F1B, 32k tokens", 512, 64, _piped("1F1B"), 76, 75.3, fp8=True, **LONG),
]


@dataclass(frozen=True, slots=True)
class Compared:
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


def workloads() -> dict[tuple[str, int], Workload]:
    """Rehearse the models, in bf16, by name and length of a sample."""
    import benchmarks.llama as llama

    found = {}
    for name, length in dict.fromkeys((row.task, row.length) for row in ROWS):
        settings = ["data.batch_size=4", f"data.length={length}"]
        recipe = load_recipe("default", settings, [], [], task=getattr(llama, name), data=llama.data)
        found[name, length] = count_workload(recipe, ("fp32", "bf16"))
    return found


def predicted_of(row: Published, work: Workload, scale: float) -> tuple[float, float]:
    """Return tokens per second and GPU, and the memory that a GPU reserves."""
    work = replace(work, batch=row.batch, compiled=row.compiled)
    layout = Layout(variant=Variant("bf16", row.remat), **row.layout)
    seconds = Model(work, cluster_of(row.gpus), scale, row.fp8).time(layout, simulated=True).total
    return row.batch * row.length / seconds / row.gpus, reserved_of(work, layout, row.fp8)


def compared(works: dict[tuple[str, int], Workload] | None = None) -> Iterator[Compared]:
    works = works or workloads()
    first, scale = ROWS[0], 1.0
    for _ in range(8):  # communication is not scaled, so a few rounds are needed
        scale *= predicted_of(first, works[first.task, first.length], scale)[0] / first.tokens
    for row in ROWS:
        work = works[row.task, row.length]
        sheet, memory = predicted_of(row, work, 1.0)
        predicted, _ = predicted_of(row, work, scale)
        gib = memory / 2**30
        yield Compared(
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


def lines(works: dict[tuple[str, int], Workload] | None = None) -> Iterator[dict[str, Any]]:
    for row in compared(works):
        yield asdict(row)
