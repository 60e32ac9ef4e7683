"""`forge plan --cluster NAME`: memory and time of an update under every strategy, by formula."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import Any

from rich.text import Text

from forge.cli import target
from forge.util import show

EXAMPLES = """\
Predicts by formula: trains nothing, and needs no GPU. Levers count as the recipe has them: add -p amp, -p remat.

examples:
  forge plan gpt2_124m --cluster h100x2
  forge plan my_task.py:MyTask -p amp --cluster a100x4,between=12.5,gpus_per_node=4
"""
COMFORT = 0.8
"""Share of the memory above which a layout counts as too large: fragmentation and NCCL are not predicted."""


def parser() -> ArgumentParser:
    parser = show.new_parser("plan", "Predict memory and time of every strategy on a cluster.", EXAMPLES)
    target.add_arguments(parser)
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="NAME",
        help="N nodes of 8 GPUs: a100xN, h100xN, h200xN, b200xN, mi300xxN; with changes: a100x4,between=12.5",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def run(args: Namespace) -> int:
    """Print the plan; 2 if nothing fits."""
    from forge_cluster.planning.hardware import load_cluster

    cluster = load_cluster(args.cluster)  # refused before anything slow is imported
    from forge_cluster.planning.formulas import memory_of, time_of
    from forge_cluster.planning.layouts import layouts
    from forge_cluster.planning.step import count_step

    recipe = target.load(args, to_train=True)
    step, room = count_step(recipe), COMFORT * cluster.memory * 2**30
    planned = [(layout, memory_of(step, layout), time_of(step, layout, cluster)) for layout in layouts(step, cluster)]
    rows: list[dict[str, Any]] = [
        {"words": words(layout), "mesh": layout.mesh, "memory": round(memory), "fits": memory <= room}
        | {**time._asdict(), "seconds": time.total, "samples_per_second": step.batch / time.total}
        for layout, memory, time in sorted(planned, key=lambda row: (row[1] > room, row[2].total))
    ]
    if args.json:
        print(json.dumps({"recipe": recipe.name, "gpus": cluster.gpus, "batch": step.batch, "rows": rows}, indent=2))
    else:
        console = show.console()
        title = f"{recipe.name}, batch {step.batch}, on {cluster.nodes} × {cluster.gpus_per_node} {cluster.name}"
        console.print(Text(f"{title}, {cluster.memory:g} GiB each", "bold"), soft_wrap=True)
        console.print(_table(rows))
        last = (
            "GiB: on the fullest GPU; dim: above 80 % of its memory. Times in ms an update. By formula, not measured."
        )
        if not any(row["fits"] for row in rows):
            last = "Nothing fits. Add -p remat or -p amp, use more GPUs, a batch that they divide, or a smaller model."
        console.print(Text(last, "dim"), soft_wrap=True)
    return 0 if any(row["fits"] for row in rows) else 2


def words(layout: Any) -> str:
    """Return what a command line says to train so."""
    from forge.contract.axes import shown

    found = [f"-p {name}" for name in layout.plugins]
    found += [f"{name}.{key}={value}" for name, own in layout.plugins.items() for key, value in own.items()]
    return " ".join([*found, *([shown(layout.mesh).replace(" ", "")] if len(layout.mesh) > 1 else [])])


def _table(rows: list[dict[str, Any]]) -> Any:
    grid = show.table("with", "GiB", "compute", "waits", "bubble", "ms", "samples/s", wrap=["with"])
    for column in grid.columns[1:]:
        column.justify = "right"
    for row in rows:
        times = [f"{1000 * row[key]:,.3g}" for key in ("compute", "waits", "bubble", "seconds")]
        cells = f"{row['memory'] / 2**30:.1f}", *times, f"{row['samples_per_second']:,.4g}"
        grid.add_row(Text(row["words"] or "one GPU"), *cells, style="" if row["fits"] else "dim")
    return grid
