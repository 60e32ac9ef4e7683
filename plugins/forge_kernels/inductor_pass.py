"""Give torch.compile the pass that puts kernels into a step's graph. Importing this imports torch's compiler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from forge_kernels.graph_rewriting import GraphRewriting


class InductorPass(CustomGraphPass):
    """A GraphRewriting as inductor takes it."""

    def __init__(self, rewriting: GraphRewriting):
        self._rewriting = rewriting

    def __call__(self, graph: fx.Graph) -> None:
        self._rewriting(graph)

    def uuid(self) -> Any:
        return f"{self._rewriting.uuid()} torch {torch.__version__}"


def rewriting_graphs(rewriting: GraphRewriting) -> AbstractContextManager[Any]:
    """Rewrite every graph that is compiled inside the `with`; a pass that is set already runs too."""
    before = config.pre_grad_custom_pass
    passes: Any = InductorPass(rewriting)
    if before is not None:
        earlier = before if isinstance(before, (list, tuple)) else [before]
        passes = [*earlier, passes]
    changes: dict[str, Any] = {"pre_grad_custom_pass": passes}
    if hasattr(config, "pre_grad_pass_timing"):
        changes["pre_grad_pass_timing"] = "early"  # also where torch knows the graph: the counts are of this run
    return config.patch(changes)
