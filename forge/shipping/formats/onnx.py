"""onnx: a graph that runs without torch."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from forge.shipping.engine import ExportError
from forge.shipping.formats.plan import Plan, refusal

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
FILE = "model.onnx"
TOLERANCE = 1e-4


def write(plan: Plan, path: Path) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                plan.model,
                plan.examples,
                str(path),
                dynamo=True,
                dynamic_shapes=plan.shapes(),
                input_names=list(plan.inputs),
                output_names=list(plan.output_names),
                external_data=False,
                verbose=False,
            )
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
