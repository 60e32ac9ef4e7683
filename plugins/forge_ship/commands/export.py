"""`forge export`: write a trained task as a file that runs elsewhere, verified against the task."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forge import registry
from forge.cli import target
from forge.errors import ForgeError, NegativeVerdict
from forge.util import show
from forge.util.text import format_bytes, short_path

if TYPE_CHECKING:
    from forge_ship.export import Export

QUANTIZE = ("int8-dynamic", "int8-static", "int8-weights", "fp8")
GROUP = "ship"
EXAMPLES = """\
examples:
  forge export runs/quickstart/RUN --to onnx
  forge export runs/quickstart/RUN --to onnx --to torchscript --out shipped/
  forge export runs/quickstart/RUN/checkpoints/best --to pt2 --out digits.pt2
  forge export runs/my_task/RUN --to aoti --task my_task.py:MyTask
  forge export runs/fashion_cnn/RUN --to onnx --quantize int8-static --max-drop 0.005
"""


def parser() -> ArgumentParser:
    formats = registry.installed("format")
    lines = [f"  {name:<18} {registry.constant(entry, 'ABOUT')}" for name, entry in formats.items()]
    listed = "\n".join(["formats that are installed:", *lines, "", EXAMPLES])
    parser = show.new_parser("export", "Write a trained task as a file that runs elsewhere, and verify it.", listed)
    parser.add_argument("run", metavar="RUN", help="a run folder, or a checkpoint in one (RUN:best)")
    parser.add_argument(
        "--to",
        required=True,
        action="append",
        choices=formats,
        metavar="FORMAT",
        help="a format of forge's or of another installed package, as listed below; may be repeated",
    )
    parser.add_argument(
        "--out",
        metavar="PATH",
        help="a file with the format's suffix; without a suffix a folder (default: RUN/export/FORMAT/)",
    )
    add_source_arguments(parser)
    parser.add_argument("--quantize", choices=QUANTIZE, metavar="KIND", help=", ".join(QUANTIZE))
    parser.add_argument(
        "--max-drop", type=float, metavar="NUMBER", help="refuse an export that loses more of the validation metric"
    )
    parser.add_argument(
        "--dynamic",
        metavar="AXES",
        action="append",
        help="auto: the batch and what the data vary (default); batch; none; or INPUT:AXIS, may be repeated",
    )
    parser.add_argument("--merge", action="store_true", help="merge adapters into their base (LoRA by peft)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    return parser


def add_source_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that find a run's task, data and weights."""
    parser.add_argument("--weights", metavar="NAME", help="raw, ema, swa or best (default: the best, averaged)")
    parser.add_argument("--task", metavar="FILE.py:Task", help="the task, or a function that makes it")
    parser.add_argument(
        "--data",
        metavar="FILE.py:function",
        help="the data, if they are neither installed by name nor `data` in the task's file",
    )
    parser.add_argument("--device", metavar="NAME", default="cpu", help="device to run on (default: %(default)s)")
    parser.add_argument("--batches", type=int, metavar="N", help="validation batches to use (default: all)")


def source_arguments(args: Namespace) -> dict[str, Any]:
    """Return what `forge.export` takes of those arguments."""
    task, data = target.task_and_data(args)
    return {
        "task": task,
        "data": data,
        "weights": args.weights,
        "device": args.device,
        "batches": args.batches,
    }


def run(args: Namespace) -> int:
    from forge_ship.export import export
    from forge_ship.verify import ExportMismatch

    dynamic = args.dynamic or ["auto"]
    if len(args.to) > 1 and args.out and Path(args.out).suffix and not Path(args.out).is_dir():
        raise ForgeError(f"--out {args.out} names one file, for {len(args.to)} formats: name a folder.")
    for to in dict.fromkeys(args.to):
        try:
            made = export(
                args.run,
                to=to,
                out=args.out,
                quantize=args.quantize,
                max_drop=args.max_drop,
                dynamic=dynamic[0] if len(dynamic) == 1 else dynamic,
                force=args.force,
                merge=args.merge,
                **source_arguments(args),
            )
        except ExportMismatch as mismatch:
            raise NegativeVerdict(
                f"{mismatch} Nothing was written{f' as {to}' if len(args.to) > 1 else ''}."
            ) from mismatch
        print_export(made)
    return 0


def print_export(made: Export) -> None:
    console, card = show.console(), made.card
    verdict = card["verification"]
    size = sum(file["bytes"] for file in card["files"].values())
    source = f"{card['weights']} weights" + (f" of update {card['update']:,}" if card["update"] is not None else "")
    console.print(Text(f"{short_path(made.path)}  {format_bytes(size)}  {source}"), soft_wrap=True)
    grid = show.table("", "name", "type", "shape")
    for kind in ("inputs", "outputs"):
        for port in card[kind]:
            grid.add_row(kind[:-1], port["name"], port["dtype"], " × ".join(map(str, port["shape"])))
    console.print(grid)
    _print_verdict(verdict)
    for note in made.notes:
        show.message(f"note: {note}", style="yellow")


def _print_verdict(verdict: dict[str, Any]) -> None:
    console = show.console()
    if verdict["weights"]:
        console.print(f"A fresh process has read {verdict['weights']:,} tensors: each is the task's.")
        return
    sizes = ", ".join(map(str, verdict["sizes"]))
    console.print(
        Text(f"Compared with the trained task in a fresh process: {verdict['batches']} batches of {sizes} rows.")
    )
    grid = show.table("output", "largest difference", "relative", "allowed")
    for output in verdict["outputs"]:
        grid.add_row(*(str(output["name"]), *(f"{output[key]:.2g}" for key in ("largest", "relative", "tolerance"))))
    console.print(grid)
    if verdict["metrics_after"]:
        grid = show.table("metric", "task", "export")
        for name, after in verdict["metrics_after"].items():
            before = verdict["metrics_before"].get(name)
            grid.add_row(name, "" if before is None else f"{before:.6g}", f"{after:.6g}")
        console.print(grid)
