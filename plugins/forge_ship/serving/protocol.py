"""Bodies of requests and answers, in JSON. A body is from a stranger: every mistake in one is refused with a status and
one line that names the fix."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from forge.checkpoint.strict_json import unique
from forge.errors import CheckpointError
from forge_ship.engine import ExportError, Port, check_inputs
from forge_ship.serving.limits import ServeLimits

JSON = "application/json"


class Refused(Exception):
    """A request that is not computed: the status and the line of its answer."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.headers = status, headers


def check_headers(headers: Mapping[str, str]) -> None:
    """Refuse bodies of another kind. A web page cannot send this kind to another server without asking it first."""
    if headers.get("content-encoding", "identity") not in ("", "identity"):
        raise Refused(415, "Content-Encoding is not supported: send the body uncompressed.")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise Refused(415, f"Set the header Content-Type to {JSON}.")


def decode(body: bytes, ports: Sequence[Port], limits: ServeLimits) -> tuple[dict[str, Tensor], int]:
    """Return the tensors of a body by name, and how many rows they have."""
    values, expected = _parse(body), [port.name for port in ports]
    if not isinstance(values, dict):
        example = ", ".join(f'"{name}": [...]' for name in expected)
        raise Refused(400, f"The body must be an object: {{{example}}}.")
    if values.keys() != set(expected):
        given = ", ".join(repr(name[:40]) for name in sorted(values)[:5]) or "nothing"
        raise Refused(400, f"The model takes {', '.join(expected)}; the body has {given}.")
    tensors = {port.name: _tensor(values[port.name], port) for port in ports}
    try:
        rows = check_inputs(tensors, ports)
    except ExportError as error:
        raise Refused(400, str(error)) from error
    for port in ports:
        for size, axis in zip(tensors[port.name].shape, port.shape, strict=True):
            if isinstance(axis, str):
                _check_size(axis, size, _most(axis, ports, limits))
    return tensors, 1 if rows is None else rows


def _check_size(axis: str, size: int, most: int | None) -> None:
    if size < 1:
        raise Refused(400, f"The axis {axis} must have at least one element.")
    if most is not None and size > most:
        cure = "--max-batch N" if axis == "batch" else f"--max-axis {axis}=N"
        raise Refused(
            413, f"The axis {axis} has {size} elements; send at most {most}, or start the server with {cure}."
        )


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


def _tensor(value: Any, port: Port) -> Tensor:
    dtype = getattr(torch, port.dtype)
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
    if dtype.is_floating_point and not bool(torch.isfinite(converted).all()):
        raise Refused(400, f"{port.name} holds NaN or infinity as {port.dtype}: send finite values.")
    if not dtype.is_floating_point and not bool((converted.to(read.dtype) == read).all()):
        raise Refused(400, f"{port.name} has values beyond {port.dtype}.")
    return converted


def _most(axis: str, ports: Sequence[Port], limits: ServeLimits) -> int | None:
    """Return the largest size that a dynamic axis may have; None without a limit."""
    if axis == "batch":
        return limits.max_batch
    seen = [port.seen[axis][1] for port in ports if port.seen and axis in port.seen]
    return limits.max_axes.get(axis, max(seen, default=None))


def _line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".")


def encode(outputs: Mapping[str, Tensor]) -> bytes:
    """Write the outputs of a model; NaN and infinity are null."""
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
