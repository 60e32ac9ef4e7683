"""Bodies of requests and answers: JSON, and raw tensors in the safetensors format. A body is from a stranger: every
mistake in one is refused with a status and one line that names the fix, before memory is taken for its values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save
from torch import Tensor

from forge.checkpoint.strict_json import count_values, unique
from forge.errors import CheckpointError
from forge_ship.engine import Port, shape_text
from forge_ship.serving.limits import ServeLimits

JSON = "application/json"
RAW = "application/octet-stream"
MAX_HEADER = 64 * 1024
"""Bytes of a safetensors header: names, dtypes and shapes of a model's inputs take some hundreds."""
RAW_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
Shapes = dict[str, tuple[int, ...]]


class Refused(Exception):
    """A request that is not computed: the status and the line of its answer."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.headers = status, headers


# ---------------------------------------------------------------------------------------------------------------------
# Which format


def body_format(content_type: str | None, content_encoding: str | None) -> str:
    """Return JSON or RAW for the headers of a request; refuse others."""
    if content_encoding not in (None, "", "identity"):
        raise Refused(415, f"Content-Encoding {content_encoding[:40]!r} is not supported: send the body uncompressed.")
    given = (content_type or "").partition(";")[0].strip().lower()
    if given not in (JSON, RAW):
        raise Refused(415, f"Set the header Content-Type to {JSON}, or to {RAW} for a body in safetensors format.")
    return given


def answer_format(accept: str | None, asked: str) -> str:
    """Return the first format of the header Accept that can be written; the request's own where any will do."""
    if not accept:
        return asked
    for part in accept.lower().split(","):
        kind, _, quality = part.partition(";")
        if quality.replace(" ", "") in ("q=0", "q=0.0"):
            continue
        if kind.strip() in (JSON, RAW):
            return kind.strip()
        if kind.strip() in ("*/*", "application/*"):
            return asked
    raise Refused(406, f"Answers are written as {JSON} or {RAW}: name one of them in the header Accept.")


# ---------------------------------------------------------------------------------------------------------------------
# Requests


def decode(body: bytes, kind: str, ports: Sequence[Port], limits: ServeLimits) -> tuple[dict[str, Tensor], int]:
    """Return the tensors of a body by name, and how many rows they have."""
    return (_decode_json if kind == JSON else _decode_raw)(body, ports, limits)


def _decode_json(body: bytes, ports: Sequence[Port], limits: ServeLimits) -> tuple[dict[str, Tensor], int]:
    most = _most_values(ports, limits)
    if most is not None and count_values(body) > most:
        raise Refused(413, f"The body has more values than {limits.max_batch} rows of this model; send fewer rows.")
    values = _by_name(_parse(body), ports)
    rows = check_shapes({name: _shape(value) for name, value in values.items()}, ports, limits)
    return {port.name: _tensor(values[port.name], port) for port in ports}, rows


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body, object_pairs_hook=unique, parse_constant=_no_constant)
    except CheckpointError as error:  # `unique`
        raise Refused(400, f"The body is not valid: {error}") from error
    except RecursionError as error:
        raise Refused(400, "The body is nested too deeply for any tensor of this model.") from error
    except ValueError as error:
        raise Refused(400, f"The body is not valid JSON: {_line(error)}.") from error


def _no_constant(name: str) -> NoReturn:
    raise Refused(400, f"{name} is not a JSON number: send finite values.")


def _by_name(content: Any, ports: Sequence[Port]) -> dict[str, Any]:
    """Return values by input name. {"inputs": ...} may wrap them, or hold the values of a model's only input."""
    example = ", ".join(f'"{port.name}": [...]' for port in ports)
    if not isinstance(content, dict):
        raise Refused(400, f'The body must be an object: {{"inputs": {{{example}}}}}.')
    inner = content.get("inputs")
    if len(content) == 1 and "inputs" in content and (isinstance(inner, dict) or ports[0].name != "inputs"):
        if not isinstance(inner, dict) and len(ports) > 1:
            raise Refused(400, f'The model has several inputs: {{"inputs": {{{example}}}}}.')
        return inner if isinstance(inner, dict) else {ports[0].name: inner}
    return content


def _shape(value: Any) -> tuple[int, ...]:
    """Return the sizes of nested lists by their first elements."""
    sizes: list[int] = []
    while isinstance(value, list):
        sizes.append(len(value))
        value = value[0] if value else None
    return tuple(sizes)


def _tensor(value: Any, port: Port) -> Tensor:
    dtype = dtype_of(port)
    if dtype.is_complex:
        raise Refused(415, f"{port.name} is {port.dtype}, which JSON cannot hold: send it as {RAW}.")
    try:
        # float64 holds every number of every floating dtype; for other dtypes torch finds what the values are
        read = torch.tensor(value, dtype=torch.float64 if dtype.is_floating_point else None)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise Refused(
            400, f"{port.name} must be nested lists of numbers, all of equal length: {_line(error)}."
        ) from error
    if not dtype.is_floating_point and (read.dtype != torch.bool if dtype == torch.bool else read.dtype != torch.int64):
        wanted = "true and false" if dtype == torch.bool else "whole numbers"
        raise Refused(400, f"{port.name} is {port.dtype}: send {wanted}.")
    converted = read.to(dtype)
    if dtype.is_floating_point:
        _refuse_nonfinite(converted, port)
    elif not bool((converted.to(read.dtype) == read).all()):
        raise Refused(400, f"{port.name} has values beyond {port.dtype}.")
    return converted


def _decode_raw(body: bytes, ports: Sequence[Port], limits: ServeLimits) -> tuple[dict[str, Tensor], int]:
    if len(body) < 8 or int.from_bytes(body[:8], "little") > min(MAX_HEADER, len(body) - 8):
        raise Refused(400, "The body is not in safetensors format: send the bytes of safetensors.torch.save(tensors).")
    try:
        entries = dict(deserialize(body))
    except SafetensorError as error:
        raise Refused(400, f"The body is not in safetensors format: {_line(error)}.") from error
    rows = check_shapes({name: tuple(entry["shape"]) for name, entry in entries.items()}, ports, limits)
    return {port.name: _raw_tensor(entries[port.name], port, limits) for port in ports}, rows


def _raw_tensor(entry: Mapping[str, Any], port: Port, limits: ServeLimits) -> Tensor:
    given = RAW_DTYPES.get(entry["dtype"], entry["dtype"])
    if given != port.dtype:
        raise Refused(400, f"{port.name} must be {port.dtype}; it is {given}.")
    dtype = dtype_of(port)
    if dtype == torch.bool and not bool((torch.frombuffer(entry["data"], dtype=torch.uint8) <= 1).all()):
        raise Refused(400, f"{port.name} is bool: its bytes must be 0 and 1.")
    tensor = torch.frombuffer(entry["data"], dtype=dtype).reshape(entry["shape"])
    if not limits.allow_nonfinite and (dtype.is_floating_point or dtype.is_complex):
        _refuse_nonfinite(tensor, port)
    return tensor


def check_shapes(shapes: Shapes, ports: Sequence[Port], limits: ServeLimits) -> int:
    """Refuse other names or shapes than the model takes, and sizes beyond the limits; return the number of rows."""
    expected = [port.name for port in ports]
    if shapes.keys() != set(expected):
        given = ", ".join(repr(name[:40]) for name in sorted(shapes)[:5]) or "nothing"
        raise Refused(400, f"The model takes {', '.join(expected)}; the body has {given}.")
    sizes: dict[str, int] = {}
    for port in ports:
        _check_shape(shapes[port.name], port, sizes)
    for name, size in sizes.items():
        most = _most(name, ports, limits)
        if size < 1:
            raise Refused(400, f"The axis {name} must have at least one element.")
        if most is not None and size > most:
            raise Refused(413, f"The axis {name} has {size} elements; send at most {most}{_cure(name)}.")
    return sizes.get("batch", 1)


def _check_shape(shape: tuple[int, ...], port: Port, sizes: dict[str, int]) -> None:
    """Compare a shape with the one of an input; `sizes` holds the dynamic axes that are known."""
    fits = len(shape) == len(port.shape) and all(
        size == (sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted)
        for size, wanted in zip(shape, port.shape, strict=True)
    )
    if not fits:
        single = len(shape) == len(port.shape) - 1 and port.shape[0] == "batch"
        hint = " Put a single sample into a list of one." if single else ""
        shown = shape_text(shape) if len(shape) <= 16 else f"{len(shape)} axes"
        raise Refused(400, f"{port.name} must have the shape {shape_text(port.shape)}; it has {shown}.{hint}")


def _cure(axis: str) -> str:
    return (
        " rows in one request, or start the server with a larger --max-batch"
        if axis == "batch"
        else f", or start the server with --max-axis {axis}=N"
    )


def _most(axis: str, ports: Sequence[Port], limits: ServeLimits) -> int | None:
    """Return the largest size that a dynamic axis may have; None without a limit."""
    if axis == "batch":
        return limits.max_batch
    seen = [port.seen[axis][1] for port in ports if port.seen and axis in port.seen]
    return limits.max_axes.get(axis, max(seen, default=None))


def _most_values(ports: Sequence[Port], limits: ServeLimits) -> int | None:
    """Return how many values JSON of the largest request has; None if an axis has no limit."""
    total = 64
    for port in ports:
        sizes = [_most(size, ports, limits) if isinstance(size, str) else size for size in port.shape]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        total += math.prod(known) * (1 + len(known))  # a number each, and as many lists as there are axes at most
    return total


def dtype_of(port: Port) -> torch.dtype:
    return getattr(torch, port.dtype)


def _refuse_nonfinite(tensor: Tensor, port: Port) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise Refused(400, f"{port.name} holds NaN or infinity as {port.dtype}: send finite values.")


def _line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".")


# ---------------------------------------------------------------------------------------------------------------------
# Answers


def encode(outputs: Mapping[str, Tensor], kind: str) -> bytes:
    """Write the outputs of a model; in JSON, NaN and infinity are null."""
    if kind == RAW:
        return save({name: tensor.detach().clone().contiguous() for name, tensor in outputs.items()})
    for name, tensor in outputs.items():
        if tensor.is_complex():
            raise Refused(406, f"{name} is complex, which JSON cannot hold: set the header Accept to {RAW}.")
    values = {"outputs": {name: tensor.tolist() for name, tensor in outputs.items()}}
    try:
        return json.dumps(values, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:  # of a value that JSON has not
        return json.dumps(_without_nonfinite(values), allow_nan=False, separators=(",", ":")).encode()


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nonfinite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_nonfinite(inner) for inner in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None
