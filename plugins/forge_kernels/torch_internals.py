"""The seam to torch: the one module of forge_kernels that reaches private names of it. See `forge.torch_internals`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad

from forge.torch_internals import Internal, dynamo_is_loaded, resolve


def _yes(*args: Any) -> bool:
    return True


def _nothing(*args: Any) -> None:
    pass


_TRANSFORMS = "know whether torch.func or forward-mode differentiation transforms a call"
_PLAIN = "Plain torch runs in place of every kernel."
_OVERWRITE = "know whether a backward may overwrite the gradient that it saved"
_COPY = "A loss's backward costs a pass over its gradient."
_GRAPHS = "put kernels into a compiled step's graphs"
_NO_GRAPHS = "Leave out kernels that replace calls of a compiled step (kernels.leave_out)."

NAMES = {
    "functorch_is_active": Internal(
        "torch._C._are_functorch_transforms_active", _TRANSFORMS, _PLAIN, or_else=lambda: _yes
    ),
    "forward_level": Internal(
        "torch.autograd.forward_ad._current_level", _TRANSFORMS, _PLAIN, or_else=lambda: 0, changes=True
    ),
    "has_kernel": Internal(
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        "know which functions autocast runs in float32",
        "Norms are not replaced under autocast.",
        or_else=lambda: _nothing,
    ),
    "keeps_graph": Internal(
        "torch._C._autograd._get_current_graph_task_keep_graph", _OVERWRITE, _COPY, or_else=lambda: _yes
    ),
    "dispatch_mode": Internal(
        "torch.utils._python_dispatch._get_current_dispatch_mode", _OVERWRITE, _COPY, or_else=lambda: _yes
    ),
    "sleep_on_device": Internal(
        "torch.cuda._sleep",
        "queue a pass while the device waits",
        "`forge kernels bench` measures the host in short passes.",
        or_else=lambda: _nothing,
    ),
    "functions_of_torch": Internal(
        "torch._dynamo.trace_rules.get_torch_obj_rule_map",
        "let torch.compile list torch's functions before one of them is replaced",
        "A replacement that is active when it lists them is not traced.",
        or_else=lambda: _nothing,
    ),
    "dynamo_utils": Internal(
        "torch._dynamo.utils",
        "keep trial compilations out of the run's counts",
        "They are counted.",
        parts="counters graph_break_reasons _compilation_metrics",
        or_else=SimpleNamespace,
    ),
    "inductor": Internal("torch._inductor.config", _GRAPHS, _NO_GRAPHS, parts="patch pre_grad_custom_pass"),
    "CustomGraphPass": Internal("torch._inductor.custom_graph_pass.CustomGraphPass", _GRAPHS, _NO_GRAPHS),
}


def __getattr__(name: str) -> Any:
    return resolve(name, NAMES, globals())


functorch_is_active = NAMES["functorch_is_active"].get()  # torch.compile traces what calls it


def is_transformed() -> bool:
    """Whether a functorch transform (torch.func) or forward-mode differentiation is active."""
    return functorch_is_active() or getattr(forward_ad, "_current_level", 0) >= 0


def autocast_widens(name: str) -> bool | None:
    """Whether autocast runs this function of torch in float32 on CUDA, if that is known."""
    return NAMES["has_kernel"].get()(f"aten::{name}", "AutocastCUDA")


def is_last_backward() -> bool:
    """Whether the graph that is being differentiated is used once, and for real: its tensors may be overwritten."""
    return NAMES["dispatch_mode"].get()() is None and not NAMES["keeps_graph"].get()()


def build_dynamo_table(soon: bool = False) -> None:
    """Let torch.compile build its table of torch's own functions before one of them is replaced.

    The table is built once, by name. Built while a replacement is active it would list the replacement as torch's
    function, which is never traced. `soon`: torch.compile will be used; otherwise only if it is loaded.
    """
    if soon or dynamo_is_loaded():
        NAMES["functions_of_torch"].get()()


@contextmanager
def without_counting() -> Iterator[None]:
    """Keep compilations meanwhile out of torch's counters of graphs, breaks and compilations, which report on the
    run."""
    utils = NAMES["dynamo_utils"].get()
    counters = {name: dict(counts) for name, counts in getattr(utils, "counters", {}).items()}
    breaks = len(getattr(utils, "graph_break_reasons", ()))
    frames = len(getattr(utils, "_compilation_metrics", ()))
    try:
        yield
    finally:
        with suppress(AttributeError, TypeError, IndexError):
            utils.counters.clear()
            for name, counts in counters.items():
                utils.counters[name].update(counts)
            del utils.graph_break_reasons[breaks:]
            while len(utils._compilation_metrics) > frames:
                utils._compilation_metrics.pop()


def rewriting_graphs(rewrite: Any) -> AbstractContextManager[Any]:
    """Rewrite every graph that is compiled inside the `with`, before torch differentiates it; a pass that is set
    already runs too. `rewrite(graph)` changes a graph, and `rewrite.uuid()` names the pass in torch's caches."""
    config, base = NAMES["inductor"].get(), NAMES["CustomGraphPass"].get()

    class GraphPass(base):
        def __call__(self, graph: Any) -> None:
            rewrite(graph)

        def uuid(self) -> Any:
            return f"{rewrite.uuid()} torch {torch.__version__}"

    before, passes = config.pre_grad_custom_pass, GraphPass()
    if before is not None:
        passes = [*(before if isinstance(before, (list, tuple)) else [before]), passes]
    changes: dict[str, Any] = {"pre_grad_custom_pass": passes}
    if hasattr(config, "pre_grad_pass_timing"):
        changes["pre_grad_pass_timing"] = "early"  # also where torch knows the graph: the counts are of this run
    return config.patch(changes)
