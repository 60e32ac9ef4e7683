"""The formats of an export, one module each: how a file is written, and how it is run without the task's code."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from forge.errors import did_you_mean
from forge_ship.engine import ExportError

FORMATS = {
    "pt2": "torch.export: a graph that Python with torch runs, and other tools read",
    "onnx": "ONNX: runs without torch (onnxruntime, OpenVINO, TensorRT, browsers)",
    "aoti": "AOTInductor: compiled native code for this kind of machine, for Python and C++",
    "torchscript": "TorchScript by tracing: for old C++ programs; torch has deprecated it",
    "executorch": "ExecuTorch: phones and small devices",
    "safetensors": "weights alone, without code",
    "pt": "weights alone as torch.save writes them; a pickle is inside",
    "pretrained": "a folder of transformers' save_pretrained, with the tokenizer",
    "triton-repository": "a model repository for NVIDIA Triton Inference Server",
}


def module_of(format: str) -> Any:
    """Import a format's module, after its packages were found."""
    if format not in FORMATS:
        raise ExportError(f"There is no format {format!r}.{did_you_mean(format, FORMATS)}")
    module = import_module(f"forge_ship.export_formats.{format.replace('-', '_')}")
    require(module.PACKAGES, f"The format {format}", getattr(module, "EXTRA", "export"))
    return module


def require(packages: tuple[str, ...], what: str, extra: str = "export") -> None:
    """Refuse with the pip line where a package is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ExportError(f"{what} needs {' and '.join(missing)}: pip install 'forge-trainer[{extra}]'")
