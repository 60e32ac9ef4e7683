"""Published: runs of others beside what the model predicts for them, so that every plan can say how far off it may be.

published.yaml holds them. Each is predicted with a factor that was fitted to all other rows
(`python -m benchmarks.planned --published --write`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from forge.util import strict_yaml
from forge_cluster.planning.hardware import Cluster, read_cluster

NEAREST = 3
FILE = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One run of a source."""

    source: str
    where: str
    cluster: Cluster
    model: str
    task: str
    "The class in benchmarks/ that has its shapes."
    length: int
    gpus: int
    batch: int
    layout: Mapping[str, Any]
    tokens: float | None = None
    "Tokens per second and GPU."
    tflops: float | None = None
    "Of the model's own operations, where tokens are not given."
    gib: float | None = None
    remat: bool = False
    "Whether blocks are recomputed whole. A selective rule is in the task."
    compiled: bool = False
    fp8: bool = False
    predicted: float = field(default=math.nan)
    predicted_gib: float | None = None

    @property
    def parameters(self) -> float:
        found = re.search(r"([\d.]+)([MB])$", self.model)
        assert found is not None
        return float(found[1]) * {"M": 1e6, "B": 1e9}[found[2]]

    @property
    def ratio(self) -> float:
        """Return predicted over published speed."""
        assert self.tokens is not None
        return self.predicted / self.tokens

    @property
    def label(self) -> str:
        layout = [str(self.layout.get("data", "fsdp"))]
        layout += [f"{short} {self.layout[key]}" for key, short in AXES.items() if key in self.layout]
        more = [name for name in ("remat", "fp8") if getattr(self, name)]
        more.append("compiled" if self.compiled else "eager")
        return f"{self.model}, {self.length:,} tokens, {self.gpus:,} {self.cluster.gpu.upper()}, " + ", ".join(
            [*layout, *more]
        )


AXES = {"tensor": "tp", "pipeline": "pp"}


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """Read the rows."""
    stored = strict_yaml.load(strict_yaml.read(FILE), FILE.name)
    found = []
    for given in stored["rows"]:
        source = stored["sources"][given["source"]]
        nodes = max(1, given["gpus"] // 8)
        cluster = read_cluster({"nodes": nodes, **source["cluster"]}, given["source"])
        found.append(PublishedRow(**given, where=source["where"], cluster=cluster))
    return tuple(found)


def typical_error(rows: Sequence[PublishedRow]) -> float:
    """Return the root of the mean squared error over rows, by logarithms, as a share."""
    return math.exp(math.sqrt(sum(math.log(row.ratio) ** 2 for row in rows) / len(rows))) - 1


def nearest_rows(parameters: float, length: int, gpus: int, gpu: str, compiled: bool) -> list[PublishedRow]:
    """Return the rows most like a plan: by factors in size, length and number of GPUs, by kind, and by compiling."""

    def distance(row: PublishedRow) -> float:
        sizes = math.log(row.parameters / parameters), math.log(row.length / length), math.log(row.gpus / gpus) / 2
        return sum(map(abs, sizes)) + (row.cluster.gpu != gpu) + (row.compiled != compiled) + row.fp8

    return sorted(published_rows(), key=distance)[:NEAREST]
