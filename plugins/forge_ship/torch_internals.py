"""The private names of torch that exports use; `forge.torch_internals` says how they are found."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from forge.torch_internals import Internal, resolve

_AOTI = "compile an export by AOTInductor, and run it"
_NO_AOTI = "The format aoti does not work."

NAMES = {
    "aoti_compile_and_package": Internal("torch._inductor.aoti_compile_and_package", _AOTI, _NO_AOTI),
    "aoti_load_package": Internal("torch._inductor.aoti_load_package", _AOTI, _NO_AOTI),
    "lstm_loops": Internal(
        "torch.export._patches.register_lstm_while_loop_decomposition",
        "export LSTM at any length",
        "A model with LSTM cannot be exported with sequences that vary in length.",
        or_else=lambda: nullcontext,
    ),
    "gru_loops": Internal(
        "torch.export._patches.register_gru_while_loop_decomposition",
        "export GRU at any length",
        "A model with GRU cannot be exported with sequences that vary in length.",
        or_else=lambda: nullcontext,
    ),
    "decompositions": Internal(
        "torch._inductor.decomposition.decompositions",
        "write torchao's operators out in torch's",
        "`forge export --quantize int8-dynamic` does not work.",
    ),
    "int_mm": Internal(
        "torch.ops.aten._int_mm.default",
        "know products of integers in a graph",
        "Models of int8-dynamic cannot be exported to onnx, nor for CUDA.",
    ),
    "quantized_decomposed": Internal(
        "torch.ao.quantization.fx._decomposed",
        "write the rounding of int8-static models out in torch's operators",
        "Such a model cannot be exported to pt2 and torchscript.",
    ),
}


def __getattr__(name: str) -> Any:
    return resolve(name, NAMES, globals())
