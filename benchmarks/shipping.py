"""Export models in every format, and count what is verified, what is refused with a reason, and what is wrong.

    python -m benchmarks.shipping [--models NAME ...] [--formats pt2 onnx aoti] [--full] [--json]

A model is wrong if an export was called verified and its outputs, computed here once more through the file, are not
those of the task. `--full` takes the recipes at their own size.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

import forge
from benchmarks.shipping_models import SMALL, STRANGERS, made
from forge.errors import ForgeError
from forge_ship.open_engine import open_engine
from forge_ship.verify import ExportMismatch

FORMATS = ("pt2", "onnx", "aoti", "torchscript", "executorch")
BATCHES = 4


def one(name: str, format: str, full: bool) -> dict[str, object]:
    """Export one model to one format, and compare the file with the task on inputs that the export did not see."""
    task, data = made(name, full)
    start = time.perf_counter()
    row: dict[str, object] = {"model": name, "format": format}
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = forge.export(task, to=format, out=Path(folder), data=data, batches=BATCHES)
        except ExportMismatch as error:
            return {**row, "result": "mismatch, nothing written", "why": str(error)}
        except ForgeError as error:
            return {**row, "result": "refused", "why": str(error).splitlines()[0]}
        seconds = time.perf_counter() - start
        relative = max(output["relative"] for output in result.card["verification"]["outputs"])
        row |= {"seconds": round(seconds, 1), "relative": relative, "bytes": result.path.stat().st_size}
        return {**row, "result": "verified" if _again(task, result) else "WRONG"}


def _again(task: forge.TaskModule, result: object) -> bool:
    """Compare with fresh inputs of the shapes on the card, where they are floats."""
    path, card = result.path, result.card  # pyright: ignore[reportAttributeAccessIssue]
    inputs = {}
    for port in card["inputs"]:
        if not port["dtype"].startswith("float"):
            return True  # ids and masks have meanings that random numbers have not
        shape = [2 if size == "batch" else (port["seen"] or {}).get(size, (size,))[0] for size in port["shape"]]
        inputs[port["name"]] = torch.randn(shape)
    found = next(iter(open_engine(path)(inputs).values()))
    with torch.no_grad():
        expected = getattr(task.eval(), card["method"])(*inputs.values())
    expected = expected if isinstance(expected, torch.Tensor) else next(iter(expected.values()))
    return bool((found - expected).abs().max() <= 1e-3 * expected.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=[*SMALL, *STRANGERS])
    parser.add_argument("--formats", nargs="*", default=["pt2", "onnx", "aoti"], choices=FORMATS)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(2)
    rows = []
    for name in args.models:
        for format in args.formats:
            row = one(name, format, args.full)
            rows.append(row)
            if args.json:
                print(json.dumps(row), flush=True)
            else:
                details = row.get("why") or f"{row['relative']:.1e} relative, {row['seconds']} s"
                print(f"{name:26} {format:12} {row['result']:10} {details}", flush=True)
    results = [row["result"] for row in rows]
    verified, wrong = results.count("verified"), results.count("WRONG")
    print(f"{verified} of {len(rows)} verified ({verified / len(rows):.0%}), {wrong} wrong")


if __name__ == "__main__":
    main()
