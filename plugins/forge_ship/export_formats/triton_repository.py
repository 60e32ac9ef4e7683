"""triton-repository: a model repository for NVIDIA Triton Inference Server, with an ONNX model.

REPOSITORY/NAME/config.pbtxt
REPOSITORY/NAME/1/model.onnx
"""

from __future__ import annotations

import re
from pathlib import Path

from forge_ship.export_formats import onnx
from forge_ship.export_formats.plan import Plan

ABOUT = "a model repository for NVIDIA Triton Inference Server"
PACKAGES = onnx.PACKAGES
EXTRA = onnx.EXTRA
FILE = "models"
TOLERANCE = onnx.TOLERANCE
RUNS_AS = "onnx"
LARGEST_BATCH = 64
DELAY = 2000
"""Microseconds that Triton may wait to fill a batch."""
TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
}


def write(plan: Plan, path: Path) -> None:
    name = re.sub(r"[^A-Za-z0-9_]+", "_", plan.name).strip("_") or "model"
    version = path / name / "1"
    version.mkdir(parents=True)
    onnx.write(plan, version / "model.onnx")
    (path / name / "config.pbtxt").write_text(config(name, version / "model.onnx"), encoding="utf-8")


def model_in(path: Path) -> Path:
    """Return the model file of a repository with one model."""
    return next(path.glob("*/1/model.onnx"))


def config(name: str, file: Path) -> str:
    """Write a model's configuration from what the ONNX file takes and returns."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    inputs, outputs = session.get_inputs(), session.get_outputs()
    batched = all(port.shape and isinstance(port.shape[0], str) for port in [*inputs, *outputs])
    lines = [f'name: "{name}"', 'platform: "onnxruntime_onnx"', f"max_batch_size: {LARGEST_BATCH if batched else 0}"]
    for kind, ports in (("input", inputs), ("output", outputs)):
        for port in ports:
            dims = [size if isinstance(size, int) else -1 for size in port.shape[1 if batched else 0 :]]
            lines += [
                f"{kind} {{",
                f'  name: "{port.name}"',
                f"  data_type: {TYPES[_dtype(port.type)]}",
                f"  dims: [{', '.join(map(str, dims or [1]))}]",
                *(["  reshape { shape: [] }"] if not dims else []),
                "}",
            ]
    if batched:
        lines += ["dynamic_batching {", f"  max_queue_delay_microseconds: {DELAY}", "}"]
    return "\n".join([*lines, ""])


def _dtype(type: str) -> str:
    """Return torch's name of an ONNX type such as tensor(float)."""
    word = type.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64"}.get(word, word)
