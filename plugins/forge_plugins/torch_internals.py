"""The private names of torch that the built-in plugins use; `forge.torch_internals` says how they are found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from forge.torch_internals import Internal, foreach, resolve

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
    "is_functorch_wrapped": Internal(
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "leave out tensors inside torch.func, which must not outlive it",
        "What looks at a layer's output fails inside torch.func.",
        or_else=lambda: lambda tensor: False,
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
