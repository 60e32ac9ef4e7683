"""Collectives: the seconds of each over a group of GPUs, by the formulas of rings and trees.

A ring of n ranks passes every byte n - 1 times in parts of 1/n; a tree halves the ranks in every step. NCCL runs
as many rings as a node has network cards in the group, so a ring through nodes is as fast as the slower of the links
inside and of the cards of all its members on a node together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forge_cluster.planning.hardware import Cluster


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate: `size` of them, `stride` apart."""

    size: int
    inside: int
    "Members on one node."
    bandwidth: float
    "Bytes per second of a ring through all members."
    hop: float
    "Mean latency of a hop of the ring, in seconds."
    far: float
    "Largest latency."
    scatters: bool
    "Whether the backend has a reduce-scatter."

    # `size` is the number of bytes of the whole tensor in all three

    def all_gather(self, size: float) -> float:
        return self._ring(size) if self.size > 1 else 0.0

    def reduce_scatter(self, size: float) -> float:
        return self._ring(size) if self.scatters else self.all_reduce(size)

    def all_reduce(self, size: float) -> float:
        if self.size == 1:
            return 0.0
        tree = 2 * size / self.bandwidth + 2 * math.ceil(math.log2(self.size)) * self.far
        return min(2 * self._ring(size), tree)

    def send(self, size: float) -> float:
        """Return the seconds of a message to the next member."""
        return 0.0 if self.size == 1 else size / self.bandwidth + self.far

    def _ring(self, size: float) -> float:
        n = self.size
        return (n - 1) / n * size / self.bandwidth + (n - 1) * self.hop


def group(cluster: Cluster, size: int, stride: int) -> Group:
    """Return the group of `size` ranks that are `stride` apart, where neighbouring ranks fill a node first."""
    inside = max(1, min(size, cluster.gpus_per_node // stride))
    reached = cluster.efficiency.links
    near, far = cluster.within, cluster.between
    if inside >= size:
        return Group(size, size, near.bandwidth * reached, near.latency, near.latency, cluster.backend != "gloo")
    nodes = math.ceil(size / inside)
    bandwidth = inside * far.bandwidth
    if inside > 1:
        bandwidth = min(near.bandwidth, bandwidth)
    hop = ((size - nodes) * near.latency + nodes * far.latency) / size
    return Group(size, inside, bandwidth * reached, hop, far.latency, cluster.backend != "gloo")
