"""onnx: a graph that runs without torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_ship.engine import ExportError
from forge_ship.export_formats.plan import Plan, quiet, refusal
from forge_ship.quantize import onnx_translations

ABOUT = "ONNX: runs without torch (onnxruntime, OpenVINO, TensorRT, browsers)"
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
EXTRA = "forge-trainer[export]"
FILE = "model.onnx"
TOLERANCE = 1e-4


def write(plan: Plan, path: Path) -> None:
    names = {"input_names": list(plan.inputs), "output_names": list(plan.output_names), "verbose": False}
    options: dict[str, Any] = {"dynamo": True, "dynamic_shapes": plan.shapes(), "external_data": False}
    options["custom_translation_table"] = onnx_translations()
    if plan.varies_length:  # dynamo would unroll a recurrent layer at the example's length; ONNX has operators for them
        options = {"dynamo": False, "dynamic_axes": plan.axes}
    try:
        with torch.no_grad(), quiet():
            torch.onnx.export(plan.model, plan.examples, str(path), **names, **options)
    except Exception as error:
        raise _explained(error, plan) from error


def _explained(error: Exception, plan: Plan) -> ExportError:
    text, cause = str(error), error.__cause__ or error
    if "No ONNX function found" in text or "Cannot find" in text or "DispatchError" in repr(cause):
        operator = next((word for word in str(cause).split() if "::" in word or "aten." in word), "an operator")
        return ExportError(
            f"ONNX has no counterpart of {operator.strip(chr(39) + '.,')}, which the model uses. Replace it in "
            f"forward, or use --to pt2 or --to aoti.\ntorch says: {str(cause).strip().splitlines()[0][:300]}"
        )
    return refusal(cause if cause.__traceback__ else error, plan)


def open_file(path: Path, names: list[str], device: str) -> Callable[[list[Tensor]], list[Tensor]]:
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    providers = ["CPUExecutionProvider"]
    if device.startswith("cuda") and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        providers = ["CUDAExecutionProvider", *providers]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    taken = {each.name for each in session.get_inputs()}

    def run(inputs: list[Tensor]) -> list[Tensor]:
        given = {name: tensor.cpu().numpy() for name, tensor in zip(names, inputs, strict=True) if name in taken}
        return [torch.from_numpy(array) for array in session.run(None, given)]

    return run
