"""Find calls that kernels replace together in a step's graph, before torch.compile differentiates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from forge_kernels import discovery, patch
from forge_kernels.contract import Kernel, Subgraph


@dataclass(slots=True)
class GraphRewriting:
    """A pass over the graphs that torch.compile makes; `torch_internals.rewriting_graphs` takes it.

    It sees the functions of torch as the user's code calls them. torch then differentiates what the pass leaves, so a
    kernel brings its own backward.
    """

    kernels: Sequence[Kernel]
    found: dict[str, int] = field(default_factory=dict)
    "Replacements by kernel, over all graphs."
    refused: dict[str, list[str]] = field(default_factory=dict)
    "Why calls that looked alike were left as written, by kernel."

    def uuid(self) -> str:
        """Identify the pass in torch's caches of compiled graphs."""
        return "forge " + " ".join(sorted(f"{kernel.name}:{discovery.version(kernel)}" for kernel in self.kernels))

    def __call__(self, graph: fx.Graph) -> None:
        places = [
            (patch.original(replaces.target), kernel.name, replaces.rewrite)
            for kernel in self.kernels
            for replaces in kernel.replaces
            if isinstance(replaces, Subgraph)
        ]
        there = set(graph.nodes)
        for node in list(graph.nodes):
            for target, name, rewrite in places:
                if node.op != "call_function" or node.target is not target or node not in there:
                    continue
                why_not = rewrite(graph, node)
                if why_not is None:
                    self.found[name] = self.found.get(name, 0) + 1
                    there = set(graph.nodes)
                elif why_not and why_not not in self.refused.setdefault(name, []):
                    self.refused[name].append(why_not)
        graph.lint()
