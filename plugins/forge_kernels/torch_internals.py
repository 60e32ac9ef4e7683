"""The private names of torch that forge_kernels uses: what each is for, and what happens on the day it is gone.

No other module of this package touches one. `forge env` prints those that the torch at hand does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch.autograd import forward_ad

from forge.errors import KernelError
from forge.torch_internals import Internal

_TRIAL = "keep trial compilations out of the run's counts"
_COUNTED = "They are counted."
_PASS = "put kernels into graphs before torch differentiates them"
_NO_PASS = "Kernels that replace calls of a compiled step are refused."
_OVERWRITE = "know whether a backward may overwrite its gradient"
_COPIES = "It never does, which costs a pass over the gradient."
_FUNC = "know whether torch.func or forward-mode differentiation transforms a call"
_PLAIN = "Plain torch runs in place of every kernel."

NAMES = {
    "functorch_active": Internal("torch._C._are_functorch_transforms_active", _FUNC, _PLAIN),
    "forward_level": Internal("torch.autograd.forward_ad._current_level", _FUNC, _PLAIN),
    "has_kernel": Internal(
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        "know which functions autocast runs in float32",
        "Under autocast such a function is not replaced.",
    ),
    "keeps_graph": Internal("torch._C._autograd._get_current_graph_task_keep_graph", _OVERWRITE, _COPIES),
    "dispatch_mode": Internal("torch.utils._python_dispatch._get_current_dispatch_mode", _OVERWRITE, _COPIES),
    "cuda_sleep": Internal(
        "torch.cuda._sleep", "measure a device without its host", "Times of short passes are those of the host."
    ),
    "rule_map": Internal(
        "torch._dynamo.trace_rules.get_torch_obj_rule_map",
        "have torch.compile list torch's functions before one is replaced",
        "torch.compile may not trace a replaced function.",
    ),
    "counters": Internal("torch._dynamo.utils", _TRIAL, _COUNTED, "counters graph_break_reasons _compilation_metrics"),
    "graph_pass": Internal("torch._inductor.config", _PASS, _NO_PASS, parts="patch pre_grad_custom_pass"),
    "CustomGraphPass": Internal("torch._inductor.custom_graph_pass.CustomGraphPass", _PASS, _NO_PASS),
}
"""Each with what it is for. The functions below do without those that are gone."""


# -- calls ------------------------------------------------------------------------------------------------------------

_functorch_is_active: Any = getattr(torch._C, "_are_functorch_transforms_active", None)


def is_transformed() -> bool:
    """Whether a functorch transform (torch.func) or forward-mode differentiation is active. Gone: always, so that
    plain torch runs."""
    if _functorch_is_active is None or not hasattr(forward_ad, "_current_level"):
        return True
    return _functorch_is_active() or forward_ad._current_level >= 0


def autocast_widens(name: str) -> bool | None:
    """Whether autocast runs this function of torch in float32 on CUDA. Gone: None, and under autocast the function is
    not replaced."""
    has_kernel: Any = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    return None if has_kernel is None else has_kernel(f"aten::{name}", "AutocastCUDA")


def is_last_backward() -> bool:
    """Whether the graph that is being differentiated is used once, and for real, so that its tensors may be
    overwritten. Gone: never, which costs a pass over the gradient."""
    keeps: Any = getattr(getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None)
    try:
        from torch.utils._python_dispatch import _get_current_dispatch_mode as mode
    except ImportError:
        return False
    return keeps is not None and mode() is None and not keeps()


def sleep_on_device(cycles: int) -> None:
    """Let the current CUDA stream wait for so many cycles. Gone: it does not, and short passes measure the host."""
    sleep: Any = getattr(torch.cuda, "_sleep", None)
    if sleep is not None:
        sleep(cycles)


# -- torch.compile ----------------------------------------------------------------------------------------------------


def build_dynamo_table(soon: bool = False) -> None:
    """Let torch.compile build its table of torch's own functions before one of them is replaced.

    The table is built once, by name. Built while a replacement is active it would list the replacement as torch's
    function, which is never traced. `soon`: torch.compile will be used; otherwise only if torch._dynamo is loaded.
    Gone: nothing is done, as there is no such table.
    """
    if not soon and "torch._dynamo" not in sys.modules:
        return
    with suppress(ImportError, AttributeError):
        from torch._dynamo.trace_rules import get_torch_obj_rule_map

        get_torch_obj_rule_map()


@contextmanager
def without_counting() -> Iterator[None]:
    """Keep compilations meanwhile out of torch's counters of graphs, breaks and compilations, which report on the run.
    Gone: what is missing is counted."""
    import torch._dynamo  # noqa: F401

    utils: Any = sys.modules.get("torch._dynamo.utils")
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
        with suppress(AttributeError, TypeError, IndexError):
            del utils.graph_break_reasons[breaks:]
        with suppress(AttributeError, TypeError, IndexError):
            while len(utils._compilation_metrics) > frames:
                utils._compilation_metrics.pop()


def rewriting_graphs(rewrite: Any) -> AbstractContextManager[Any]:
    """Rewrite every graph that is compiled inside the `with`, before torch differentiates it; a pass that is set
    already runs too. `rewrite(graph)` changes a graph, and `rewrite.uuid()` names the pass in torch's caches. Gone:
    refused."""
    try:
        from torch._inductor import config
        from torch._inductor.custom_graph_pass import CustomGraphPass

        before = config.pre_grad_custom_pass
    except (ImportError, AttributeError) as error:
        raise KernelError(
            f"Kernels cannot be put into compiled graphs with torch {torch.__version__}: {error}. Leave out those that "
            "replace calls of a compiled step (kernels.leave_out), or use another torch."
        ) from error

    class GraphPass(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            rewrite(graph)

        def uuid(self) -> Any:
            return f"{rewrite.uuid()} torch {torch.__version__}"

    earlier = before if isinstance(before, (list, tuple)) else [] if before is None else [before]
    changes: dict[str, Any] = {"pre_grad_custom_pass": [*earlier, GraphPass()] if earlier else GraphPass()}
    if hasattr(config, "pre_grad_pass_timing"):
        changes["pre_grad_pass_timing"] = "early"  # also where torch knows the graph: the counts are of this run
    return config.patch(changes)
