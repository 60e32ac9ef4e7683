"""The private names of torch that forge_cluster uses; `forge.torch_internals` says how they are found."""

from __future__ import annotations

from typing import Any

from forge.torch_internals import Internal, resolve

_RING_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_RING = "pass keys and values round a ring of ranks"
_NO_RING = "The plugin context_parallel does not work."

NAMES = {
    "RotateMethod": Internal(f"{_RING_MODULE}._RotateMethod", _RING, _NO_RING, parts="ALL_TO_ALL"),
    "ring_options": Internal(
        f"{_RING_MODULE}._cp_options", _RING, _NO_RING, parts="convert_to_f32 enable_load_balance rotate_method"
    ),
    "ring_attention": Internal(f"{_RING_MODULE}._templated_ring_attention", _RING, _NO_RING),
    "ring_attention_backward": Internal(f"{_RING_MODULE}._templated_ring_attention_backward", _RING, _NO_RING),
    "flash_backward": Internal("torch.ops.aten._scaled_dot_product_flash_attention_backward.default", _RING, _NO_RING),
    "efficient_backward": Internal("torch.ops.aten._scaled_dot_product_efficient_attention_backward", _RING, _NO_RING),
    "flash_on_cpu": Internal("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", _RING, _NO_RING),
    "flash_on_cpu_backward": Internal(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", _RING, _NO_RING
    ),
    "all_to_all": Internal(
        "torch.distributed._functional_collectives.all_to_all_single_autograd",
        "send tokens to the ranks of their experts, and gradients back",
        "The plugin expert_parallel does not work.",
    ),
    "without_function_modes": Internal(
        "torch._C.DisableTorchFunction",
        "leave out the mode that sees the task's calls where torch's own ring makes them",
        _NO_RING,
    ),
}


def __getattr__(name: str) -> Any:
    return resolve(name, NAMES, globals())
