"""The seam to torch: the one module of forge_kernels that reaches private names of it. See `forge.torch_internals`."""

from __future__ import annotations

from typing import Any

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

NAMES = {
    "functorch_is_active": Internal(
        "torch._C._are_functorch_transforms_active", _TRANSFORMS, _PLAIN, or_else=lambda: _yes
    ),
    "forward_level": Internal(
        "torch.autograd.forward_ad._current_level", _TRANSFORMS, _PLAIN, or_else=lambda: 0, changes=True
    ),
    "keeps_graph": Internal(
        "torch._C._autograd._get_current_graph_task_keep_graph", _OVERWRITE, _COPY, or_else=lambda: _yes
    ),
    "dispatch_mode": Internal(
        "torch.utils._python_dispatch._get_current_dispatch_mode", _OVERWRITE, _COPY, or_else=lambda: _yes
    ),
    "functions_of_torch": Internal(
        "torch._dynamo.trace_rules.get_torch_obj_rule_map",
        "let torch.compile list torch's functions before one of them is replaced",
        "A replacement that is active when it lists them is not traced.",
        or_else=lambda: _nothing,
    ),
}


def __getattr__(name: str) -> Any:
    return resolve(name, NAMES, globals())


functorch_is_active = NAMES["functorch_is_active"].get()  # torch.compile traces what calls it


def is_transformed() -> bool:
    """Whether a functorch transform (torch.func) or forward-mode differentiation is active."""
    return functorch_is_active() or getattr(forward_ad, "_current_level", 0) >= 0


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
