"""Training speeds and memory that others have published, beside what `forge plan --cluster` computes by its formulas.

    python -m benchmarks.published             # a table, in a second: nothing is trained, and no GPU is needed
    python -m benchmarks.published --write     # and write it into docs/planning-clusters.md

A model is known by its shape alone. Two numbers are fitted, `many` in gpus.toml: the time of computation on more than
one GPU over that on one, for H100 and for A100. Each row is computed with the factor that fits all other rows best.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forge_cluster.planning.formulas import memory_of, time_of
from forge_cluster.planning.hardware import load_cluster
from forge_cluster.planning.layouts import Layout
from forge_cluster.planning.step import UpdateCost

PAGE = Path(__file__).parents[1] / "docs/planning-clusters.md"
BEGIN, END = "<!-- by python -m benchmarks.published --write -->", "<!-- end of the table -->"
SELECTIVE = 0.5
"""The share of forward that torchtitan's selective rule repeats: every second product, and all that is cheap."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder: its head is a parameter of its own, or the embedding (`tied`)."""

    parameters: float
    layers: int
    width: int
    words: int
    tied: bool = False


SHAPES = {
    "Llama 3 8B": Shape(8.03e9, 32, 4096, 128256),
    "Llama 3 70B": Shape(70.6e9, 80, 8192, 128256),
    "Llama 3 405B": Shape(405.9e9, 126, 16384, 128256),
    "Llama 2 7B": Shape(6.74e9, 32, 4096, 32000),
    "Llama 2 13B": Shape(13.0e9, 40, 5120, 32000),
    "Llama 2 70B": Shape(69.0e9, 80, 8192, 32000),
    "MPT 7B": Shape(6.65e9, 32, 4096, 50368, tied=True),
    "MPT 13B": Shape(12.8e9, 40, 5120, 50368, tied=True),
    "MPT 30B": Shape(30.0e9, 48, 7168, 50368, tied=True),
    "MPT 70B": Shape(64.8e9, 80, 8192, 50368, tied=True),
    "GPT-2 124M": Shape(124e6, 12, 768, 50257, tied=True),
}


@dataclass(frozen=True, slots=True)
class Published:
    """One run of a source."""

    model: str
    length: int
    cluster: str
    batch: int
    layout: Layout
    tokens: float
    "Per second and GPU."
    source: str
    remat: float = 0.0
    compiled: bool = False
    gib: float | None = None


TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = "torchtitan, docs/performance.md of 2024"
MOSAIC = "MosaicML, llm-foundry, scripts/train/benchmarking/README.md"
IBM = "IBM and PyTorch, foundation-model-stack/fms-fsdp, README.md"
META = "Grattafiori et al., 2024, The Llama 3 Herd of Models, table 4"
OURS = "forge, benchmarks/LOG.md"
TITANS, NARROW = "h100x{},memory=95,memory_bandwidth=2400", "a100x16,between=6.25"


EIGHT, MANY = Layout(shard=8), Layout(shard=64)
DEEP = Layout(shard=64, tensor=8, pipe=16, micros=32, schedule="interleaved_1f1b")
ROWS = [
    Published("Llama 3 8B", 8192, TITANS.format(1), 16, EIGHT, 5762, TITAN, SELECTIVE, gib=82.4),
    Published("Llama 3 8B", 8192, TITANS.format(1), 16, EIGHT, 6667, TITAN, SELECTIVE, True, 77.0),
    Published("Llama 3 8B", 8192, TITANS.format(16), 256, Layout(shard=128), 5605, TITAN, SELECTIVE, gib=67.0),
    Published("Llama 3 8B", 8192, TITANS.format(16), 256, Layout(shard=128), 6514, TITAN, SELECTIVE, True, 62.0),
    Published("Llama 3 70B", 8192, TITANS.format(32), 512, Layout(shard=32, tensor=8), 597, TITAN, 1.0, True),
    Published("Llama 3 8B", 8192, "a100x8", 64, MANY, 2973, TITAN_A100, SELECTIVE),
    Published("Llama 3 70B", 8192, "a100x8", 64, MANY, 331, TITAN_A100, 1.0),
    Published("Llama 2 13B", 4096, "a100x8", 128, MANY, 2162, TITAN_A100),
    Published("Llama 2 70B", 4096, "a100x8", 128, MANY, 353, TITAN_A100, 1.0),
    Published("Llama 2 7B", 4096, NARROW, 256, Layout(data=16, shard=8), 3760, IBM),
    Published("Llama 2 70B", 4096, NARROW, 768, Layout(shard=128), 380, IBM, 1.0),
    Published("MPT 7B", 2048, "h100", 48, EIGHT, 10643, MOSAIC),
    Published("MPT 7B", 4096, "h100", 128, EIGHT, 8611, MOSAIC, 1.0),
    Published("MPT 7B", 8192, "h100", 64, EIGHT, 6935, MOSAIC, 1.0),
    Published("MPT 13B", 2048, "h100", 16, EIGHT, 4792, MOSAIC),
    Published("MPT 13B", 2048, "h100x8", 128, MANY, 4800, MOSAIC),
    Published("MPT 30B", 2048, "h100x4", 448, Layout(shard=32), 2308, MOSAIC, 1.0),
    Published("MPT 70B", 2048, "h100x8", 512, MANY, 1039, MOSAIC, 1.0),
    Published("MPT 7B", 2048, "a100", 48, EIGHT, 4641, MOSAIC),
    Published("MPT 30B", 2048, "a100", 24, EIGHT, 916, MOSAIC, 1.0),
    Published("Llama 3 405B", 8192, "h100x1024", 2048, DEEP, 169, META),
    Published("GPT-2 124M", 1024, "h200,gpus_per_node=1", 64, Layout(), 362_000, OURS),
    Published("GPT-2 124M", 1024, "h200,gpus_per_node=1", 64, Layout(), 532_000, OURS, compiled=True),
]
KINDS = [[row for row in ROWS if row.cluster.startswith(kind) and row.layout.mesh] for kind in ("h100", "a100")]


def step_of(row: Published) -> UpdateCost:
    """Return the step of a decoder in bf16, with AdamW in float32, by its shape; a sample has `length` tokens.

    A weight costs 6 operations a token and 2 more where forward is repeated, attention 7 × length × width a layer, in
    its fused kernel. A layer keeps 34 bytes a token and width (Korthikanti et al., 2022), the loss 10 bytes a word.
    Recomputed blocks keep their inputs, and one of them the rest.
    """
    shape, length = SHAPES[row.model], row.length
    outside = shape.words * shape.width * (1 if shape.tied else 2)
    loss = 10 * length * shape.words
    kept = length * 34 * shape.width * shape.layers
    again = length * (2 * shape.width * shape.layers + 34 * shape.width)
    products = shape.parameters - (0 if shape.tied else shape.words * shape.width)
    return UpdateCost(
        batch=row.batch,
        parameters=4 * shape.parameters,
        gradients=4 * shape.parameters,
        optimizer=8 * shape.parameters,
        held=loss + kept + row.remat * (again - kept),
        kept=loss + kept,
        matmul=length * (6 + 2 * row.remat) * products,
        attention=length * (7 + 2 * row.remat) * length * shape.width * shape.layers,
        forward=1 / (3 + row.remat),
        blocks=shape.layers,
        block=4 * (shape.parameters - outside) / shape.layers,
        hidden=2 * length * shape.width,
        short=True,
        wide=0.5,
        compiled=row.compiled,
    )


def tokens_of(row: Published, many: float | None = None) -> float:
    """Return the tokens per second and GPU, by the factor of gpus.toml or another."""
    cluster = load_cluster(row.cluster)
    if many is not None:
        cluster = replace(cluster, shares={**cluster.shares, "many": many})
    return row.batch * row.length / time_of(step_of(row), row.layout, cluster).total / cluster.gpus


def fitted(rows: Sequence[Published]) -> float:
    """Return the factor `many` whose errors have the mean 0, by logarithms."""
    low, high = 0.2, 5.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        faster = statistics.fmean(math.log(tokens_of(row, middle) / row.tokens) for row in rows) > 0
        low, high = (middle, high) if faster else (low, middle)
    return low


def alike(rows: Sequence[Published], row: Published) -> list[Published]:
    """Return the other rows of this kind of GPU that have several."""
    return [other for other in rows if other is not row and other.layout.mesh and other.cluster[:4] == row.cluster[:4]]


def ratios(rows: Sequence[Published] = ROWS) -> list[float]:
    """Return computed over published speed, each with a factor that was fitted without it."""
    return [tokens_of(row, fitted(alike(rows, row)) if row.layout.mesh else None) / row.tokens for row in rows]


def typical_error(found: Sequence[float]) -> float:
    """Return the root of the mean square, by logarithms, as a share."""
    return math.exp(math.sqrt(statistics.fmean(math.log(ratio) ** 2 for ratio in found))) - 1


def scaling_of_the_guide() -> float:
    """Return how much faster four A100 are than one, for 350 million parameters and 80 ms of compute."""
    cluster, parameters = load_cluster("a100,gpus_per_node=4"), 4 * 350e6
    step = UpdateCost(
        batch=4,
        parameters=parameters,
        gradients=parameters,
        optimizer=0.0,
        held=0.0,
        kept=0.0,
        matmul=0.0,
        blocks=24,
        block=parameters / 24,
        seconds=4 * 0.080,
    )
    alone = replace(step, batch=1, seconds=0.080)
    return 4 * time_of(alone, Layout(), cluster).total / time_of(step, Layout(data=4), cluster).total


def table() -> str:
    """Return the table of the page."""
    lines = ["| model | layout | GPUs | tokens/s and GPU | by formula | ratio | GiB | by formula |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    found = ratios()
    for row, ratio in zip(ROWS, found, strict=True):
        cluster = load_cluster(row.cluster)
        recomputed = {0.0: "", SELECTIVE: ", selective remat", 1.0: ", remat"}[row.remat]
        kind = f"{_layout(row.layout)}{recomputed}{', compiled' if row.compiled else ''}"
        shown = f"{row.tokens:,.0f} | {ratio * row.tokens:,.0f} | {ratio:.2f}"
        gib = f"{row.gib} | {memory_of(step_of(row), row.layout) / 2**30:.1f}" if row.gib else " | "
        number = f"{row.layout.samplers * row.layout.tensor * row.layout.pipe:,} {cluster.name.upper()}"
        lines.append(f"| {row.model}, {row.length:,} tokens | {kind} | {number} | {shown} | {gib} |")
    factors = ", ".join(f"{fitted(kind):.2f} for {kind[0].cluster[:4].upper()}" for kind in KINDS)
    end = f"Typical error {typical_error(found):.0%} (root mean square of logarithms). `many`, fitted: {factors}."
    guide = "A guide's encoder of 350 million parameters with DDP on four A100, 80 ms of compute: "
    guide += f"{scaling_of_the_guide():.2f} times one GPU by formula, 3.7 in the guide."
    sources = "Sources: " + "; ".join(dict.fromkeys(row.source for row in ROWS)) + "."
    return "\n\n".join(["\n".join(lines), end, guide, sources])


def _layout(layout: Layout) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in layout.mesh.items()) or "one"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    options = parser.parse_args(arguments)
    text = table()
    print(text)
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
