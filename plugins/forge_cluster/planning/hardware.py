"""Hardware: GPUs, the links between them, and the seconds of a collective over a group of ranks."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from forge.errors import ForgeError, did_you_mean

WHOLE = ("nodes", "gpus_per_node")
FILE = Path(__file__).with_name("gpus.toml")
LATENCY = {"within": 3e-6, "between": 10e-6}
"""Seconds of one message inside a node, and between nodes."""
LAUNCH = 18e-6
"""Seconds of the host for one operation of the model, eager; measured beside an H200."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal GPUs, in the units of gpus.toml."""

    name: str
    nodes: int
    gpus_per_node: int
    memory: float
    bf16: float
    fp32: float
    memory_bandwidth: float
    within: float
    between: float
    shares: Mapping[str, float]
    "The shares of these figures that programs reach."

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def bytes_per_second(self) -> float:
        """Return what the memory of one GPU reaches."""
        return self.memory_bandwidth * 1e9 * self.shares["memory"]

    def flops(self, kind: str, short: bool) -> float:
        """Return the FLOP per second that `matmul` or `attention` reach, in bf16 or fp32."""
        return (self.bf16 if short else self.fp32) * 1e12 * self.shares[kind]

    def ring(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds of an all-gather or reduce-scatter of so many bytes in all, over ranks that are `stride`
        apart: each of them passes on all but its own part. The slowest link counts, and between nodes the cards of all
        members on a node together; an all-reduce is two of these."""
        if ranks == 1:
            return 0.0
        inside = max(1, min(ranks, self.gpus_per_node // stride))
        link = self.within if inside == ranks else inside * self.between
        if inside > 1:
            link = min(self.within, link)
        latency = LATENCY["within" if inside == ranks else "between"]
        return (ranks - 1) / ranks * size / (link * 1e9 * self.shares["links"]) + math.ceil(math.log2(ranks)) * latency


@cache
def _known() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())


def load_cluster(text: str) -> Cluster:
    """Return the cluster of a name, such as h100x16 (nodes of 8), with changes: h100x16,between=25,gpus_per_node=4."""
    name, *changes = text.lower().split(",")
    gpus, shares = _known()["gpus"], _known()["shares"]
    named = re.fullmatch(rf"({'|'.join(gpus)})(?:x(\d+))?", name)
    if named is None:
        names = ", ".join(f"{name}xN" for name in gpus)
        raise ForgeError(f"--cluster {text}: {name} is not known. Give N nodes of 8 GPUs by name, {names}.")
    found: dict[str, Any] = {"nodes": int(named[2] or 1), "gpus_per_node": 8, **gpus[named[1]]}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in found:
            raise ForgeError(f"--cluster {text}: {key} cannot be changed.{did_you_mean(key, found)}")
        if not re.fullmatch(r"\d*\.?\d+", value) or (isinstance(found[key], int) and key in WHOLE and "." in value):
            raise ForgeError(f"--cluster {text}: {key} is {value!r}; it must be a number above 0.")
        found[key] = int(value) if key in WHOLE else float(value)
    if min(found.values()) <= 0:
        raise ForgeError(f"--cluster {text}: every number must be above 0.")
    return Cluster(
        named[1], **found, shares={key: share.get(named[1], share["value"]) for key, share in shares.items()}
    )
