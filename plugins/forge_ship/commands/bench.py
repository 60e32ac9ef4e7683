"""`forge bench`: time a trained task's inference in several engines."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import asdict

from rich.text import Text

from forge.util import show
from forge_ship.commands.export import add_source_arguments, source_arguments

GROUP = "ship"
AFTER = "export"
EXAMPLES = """\
examples:
  forge bench runs/quickstart/RUN
  forge bench runs/quickstart/RUN --batch 1,64 --engines eager,aoti,onnx,onnx:int8-static
  forge bench runs/my_task/RUN --task my_task.py:MyTask --device cuda --json
"""


def parser() -> ArgumentParser:
    parser = show.new_parser("bench", "Time inference: latency and throughput, engine by engine.", EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="a run folder, or a checkpoint in one (RUN:best)")
    parser.add_argument("--batch", type=_sizes, default=(1, 8, 32), metavar="1,8,32", help="batch sizes")
    parser.add_argument(
        "--engines",
        type=lambda text: tuple(text.split(",")),
        metavar="NAMES",
        help="eager, compile, or a format of forge export that has a program, such as onnx; onnx:int8-static is "
        "quantised (default: eager,compile,pt2,aoti,onnx)",
    )
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="per engine and size (default: 1)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch (default: torch's own)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_source_arguments(parser)
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no list of sizes, such as 1,8,32") from None


def run(args: Namespace) -> int:
    import torch

    from forge.runs.trained_task import find
    from forge_ship.bench import DEFAULT, bench
    from forge_ship.export import loader_of

    if args.threads:
        torch.set_num_threads(args.threads)
    given = source_arguments(args)
    source = find(args.run, given["task"], given["weights"])
    source.task.to(args.device)
    timing = {"batches": args.batch, "device": args.device, "seconds": args.seconds}
    result = bench(source, loader_of(source, given["data"]), engines=args.engines or DEFAULT, **timing)
    if args.json:
        print(json.dumps(asdict(result)))
        return 0
    console = show.console()
    console.print(Text(f"{source.words}; {result.device}, {result.threads} threads"), soft_wrap=True)
    grid = show.table("engine", "batch", "p50 ms", "p95 ms", "p99 ms", "samples/s")
    for each in sorted(result.timings, key=lambda each: each.batch):
        times = (f"{value:.3g}" for value in (each.p50, each.p95, each.p99))
        grid.add_row(each.engine, str(each.batch), *times, f"{each.throughput:,.0f}")
    console.print(grid)
    for name, why in result.missing.items():
        console.print(Text(f"{name}: {why}", "yellow"), soft_wrap=True)
    return 0
