"""The private names of torch that the built-in plugins use; `forge.torch_internals` says how they are found."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from forge.torch_internals import Internal, foreach, resolve


def _mark_each(tensors: Any, flag: Any, one: Any) -> None:
    """Set `flag` to 1 on the device if an entry is NaN or infinite."""
    for tensor in tensors:
        flag.masked_fill_(~tensor.isfinite().all(), 1.0)


_REPORT = "count what torch.compile did"
_NO_REPORT = "The report of compiled graphs is shorter."
_COMPILER = "refuse inductor before training where its compiler is missing"
_NO_COMPILER = "It fails in the first update instead."
_HISTORY = "record CUDA allocations"
_NO_HISTORY = "The profiler has no history of memory."

NAMES = {
    "foreach_abs": foreach("abs"),
    "foreach_add_": foreach("add_"),
    "foreach_lerp_": foreach("lerp_"),
    "foreach_mul_": foreach("mul_"),
    "foreach_norm": foreach("norm"),
    "foreach_sub_": foreach("sub_"),
    "mark_non_finite": Internal(
        "torch._amp_foreach_non_finite_check_and_unscale_",
        "look at all gradients in one kernel per dtype",
        "Each gradient takes kernels of its own.",
        or_else=lambda: _mark_each,
    ),
    "current_autograd_node": Internal(
        "torch._C._current_autograd_node",
        "tell a backward from a forward",
        "`anomaly` names no line for a backward; `monitor` counts a checkpointed block twice.",
        or_else=lambda: lambda: None,
    ),
    "sequence_nr": Internal(
        "torch._C._autograd._get_sequence_nr",
        "find the forward operation of a backward",
        "`anomaly` names no line for a backward.",
        or_else=lambda: lambda: 0,
    ),
    "leave_to_others": Internal(
        "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
        "leave parameters that ranks divide, as experts, out of the average over all ranks",
        "The plugin expert_parallel does not work beside ddp.",
    ),
    "is_functorch_wrapped": Internal(
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "leave out tensors inside torch.func, which must not outlive it",
        "What looks at a layer's output fails inside torch.func.",
        or_else=lambda: lambda tensor: False,
    ),
    "saved_tensors_hooks": Internal(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "step aside where a model forbids hooks on saved tensors",
        "`throughput` cannot measure such a model's activations.",
        or_else=lambda: lambda ignore: None,
    ),
    "module_states": Internal(
        "torch.distributed._composable_state._module_state_mapping",
        "undo fully_shard",
        "A task that was sharded cannot be sharded again in the same process.",
        or_else=dict,
    ),
    "cuda_sleep": Internal(
        "torch.cuda._sleep",
        "measure how long a GPU works on an update",
        "Nothing says that the GPU waits for the host.",
        or_else=lambda: None,
    ),
    "cuda_history_enabled": Internal(
        "torch._C._cuda_isHistoryEnabled",
        _HISTORY,
        _NO_HISTORY,
        or_else=lambda: lambda: True,
        build="torch.backends.cuda.is_built",
    ),
    "record_memory_history": Internal("torch.cuda.memory._record_memory_history", _HISTORY, _NO_HISTORY),
    "dump_memory_snapshot": Internal("torch.cuda.memory._dump_snapshot", _HISTORY, _NO_HISTORY),
    "dynamo_config": Internal(
        "torch._dynamo.config",
        "set options of torch.compile for a run",
        "torch.compile runs with its own options.",
        parts="patch",
        or_else=lambda: SimpleNamespace(patch=lambda *args, **options: nullcontext()),
    ),
    "compile_counters": Internal("torch._dynamo.utils.counters", _REPORT, _NO_REPORT, or_else=lambda: None),
    "graph_break_reasons": Internal(
        "torch._dynamo.utils.graph_break_reasons", _REPORT, _NO_REPORT, or_else=list, changes=True
    ),
    "compilation_metrics": Internal(
        "torch._dynamo.utils.get_compilation_metrics", _REPORT, _NO_REPORT, or_else=lambda: list, changes=True
    ),
    "compiler_stance": Internal(
        "torch._dynamo.eval_frame._stance",
        "say why torch.compile compiles nothing",
        "It is not said.",
        or_else=lambda: SimpleNamespace(stance="default"),
        changes=True,
    ),
    "find_cpp_compiler": Internal(
        "torch._inductor.cpp_builder.get_cpp_compiler", _COMPILER, _NO_COMPILER, or_else=lambda: lambda: None
    ),
    "InvalidCxxCompiler": Internal(
        "torch._inductor.exc.InvalidCxxCompiler", _COMPILER, _NO_COMPILER, or_else=lambda: ChildProcessError
    ),
    "has_triton": Internal("torch.utils._triton.has_triton", _COMPILER, _NO_COMPILER, or_else=lambda: lambda: True),
}


def __getattr__(name: str) -> Any:
    return resolve(name, NAMES, globals())
