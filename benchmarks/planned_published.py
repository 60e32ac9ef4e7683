"""Published training speeds and memory beside what `forge plan --cluster` predicts for them.

    python -m benchmarks.planned --published            # 6 minutes: runs dry the models on tensors without values
    python -m benchmarks.planned --published --json
    python -m benchmarks.planned --published --write    # also writes what is predicted into the data file

The rows and their sources are in plugins/forge_cluster/planning/published.yaml. One factor of all computation on many
GPUs is fitted for each kind of GPU, to all its rows; what stands beside a row is predicted with the factor of all other
rows. The rest of what predictions rest on is in figures.yaml.

What torchtitan ran, by its code of December 2024: float32 parameters and AdamW, bfloat16 products, gradients reduced
in float32; selective checkpointing `op` (attention and every second matrix product of a block are kept) or blocks
recomputed whole; tensor parallelism with norms by positions and a loss divided by classes; pipelines that keep
parameters gathered and have as many micro-batches as ranks, the default, since the tables name none. The memory is
`reserved_bytes.all.peak` of the fullest GPU. Others name neither compile nor the memory.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from forge.config.recipe import load_recipe
from forge_cluster.planning import Layout, Model, PublishedRow, Variant, Workload, count_workload, reserved_of
from forge_cluster.planning import published as stored

Works = Mapping[tuple[str, int], Workload]


@dataclass(frozen=True, slots=True)
class Compared:
    model: str
    layout: str
    source: str
    gpus: int
    length: int
    tokens: float
    predicted: float
    ratio: float
    gib: float | None
    predicted_gib: float | None
    memory_ratio: float | None


def workloads(rows: list[PublishedRow]) -> Works:
    """Run dry the models, in bf16 or under amp, by name and length of a sample."""
    from benchmarks import llama, mpt, planned

    found = {}
    for name, length in dict.fromkeys((row.task, row.length) for row in rows):
        task = next(getattr(module, name) for module in (llama, mpt, planned) if hasattr(module, name))
        settings = ["data.batch_size=4", f"data.length={length}"]
        recipe = load_recipe("default", settings, [], [], task=task, data=llama.data)
        short = "amp" if name == "GPT2" else "bf16"
        found[name, length] = count_workload(recipe, ("fp32", short))
    return found


def layout_of(row: PublishedRow) -> Layout:
    layout = Layout(**{"data": "fsdp", "variant": Variant("bf16", row.remat), **row.layout})
    return replace(layout, variant=Variant("amp", row.remat)) if layout.data == "single" else layout


def seconds_of(row: PublishedRow, works: Works, many: float) -> float:
    """Return the predicted seconds of an update, if computation on many GPUs takes `many` times its kernels."""
    cluster = row.cluster
    cluster = replace(cluster, efficiency=replace(cluster.efficiency, many=many))
    work = replace(works[row.task, row.length], batch=row.batch, compiled=row.compiled)
    return Model(work, cluster, fp8=row.fp8).time(layout_of(row), simulated=True).total


def tokens_of(row: PublishedRow, works: Works) -> float:
    """Return the published tokens per second and GPU; the operations of a token are ours where FLOP/s are given."""
    if row.tokens is not None:
        return row.tokens
    assert row.tflops is not None
    work = replace(works[row.task, row.length], batch=row.batch)
    return row.tflops * 1e12 * row.batch * row.length / Model(work, row.cluster).flops()


def fitted(rows: list[PublishedRow], works: Works, many: float = 1.0, rounds: int = 5) -> float:
    """Return the factor with which half of the rows are too slow and half too fast."""
    for _ in range(rounds):  # communication is not scaled, so a few are needed
        speeds = [row.batch * row.length / row.gpus / seconds_of(row, works, many) for row in rows]
        many *= statistics.median(speed / tokens_of(row, works) for row, speed in zip(rows, speeds, strict=True))
    return many


def factors(rows: list[PublishedRow], works: Works) -> dict[str, float]:
    """Return the factor of each kind of GPU that has rows of several."""
    several = [row for row in rows if row.gpus > 1]
    kinds = dict.fromkeys(row.cluster.gpu for row in several)
    return {kind: fitted([row for row in several if row.cluster.gpu == kind], works) for kind in kinds}


def compared(rows: list[PublishedRow], works: Works, every: Mapping[str, float]) -> Iterator[Compared]:
    for row in rows:
        others = [other for other in rows if other.cluster.gpu == row.cluster.gpu and other is not row]
        many = fitted(others, works, every[row.cluster.gpu], rounds=2) if row.gpus > 1 else 1.0
        layout = layout_of(row)
        predicted = row.batch * row.length / row.gpus / seconds_of(row, works, many)
        gib = None
        if row.gib is not None:
            gib = reserved_of(replace(works[row.task, row.length], batch=row.batch), layout, row.fp8) / 2**30
        tokens = tokens_of(row, works)
        yield Compared(
            row.model,
            f"{layout.label}{', remat' * row.remat}{', compiled' * row.compiled}{', float8' * row.fp8}",
            row.source,
            row.gpus,
            row.length,
            round(tokens, 1),
            round(predicted, 1),
            round(predicted / tokens, 3),
            row.gib,
            None if gib is None else round(gib, 1),
            None if row.gib is None or gib is None else round(gib / row.gib, 3),
        )


def write(found: list[Compared], every: Mapping[str, float]) -> None:
    """Put what is predicted, and the factors of all rows, into the data files."""
    folder = Path(stored.__file__).parent
    text = (folder / "published.yaml").read_text(encoding="utf-8")
    lines, rows = text.splitlines(), iter(found)
    for number, line in enumerate(lines):
        if line.startswith("  - {"):
            row = next(rows)
            kept = re.sub(r", predicted.*", "", line.rstrip("}"))
            gib = "" if row.predicted_gib is None else f", predicted_gib: {row.predicted_gib}"
            tokens = "" if ", tokens: " in kept else f", tokens: {row.tokens}"
            lines[number] = f"{kept}{tokens}, predicted: {row.predicted}{gib}}}"
    (folder / "published.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    figures = (folder / "figures.yaml").read_text(encoding="utf-8")
    figures = re.sub(r"(\n  many:\n    value: )[\d.]+", rf"\g<1>{every['h100']:.2f}", figures)
    figures = re.sub(r"(many: \{value: )[\d.]+", rf"\g<1>{every['a100']:.2f}", figures)
    (folder / "figures.yaml").write_text(figures, encoding="utf-8")
