"""`forge plan --cluster FILE`: print the best strategies on a cluster, with the commands, and the expected goodput."""

from __future__ import annotations

import json
import math
import shlex
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forge.cli import target
from forge.util import show

if TYPE_CHECKING:
    from forge.config import Recipe
    from forge_cluster.planning import Cluster, ClusterPlan, Layout, Prediction


GROUP = "scale"
EXAMPLES = """\
Compares all strategies on a cluster, by memory and time. Trains nothing, unless --calibrate asks for it.

examples:
  forge plan gpt2_124m --cluster h100x2
  forge plan my_task.py:MyTask --cluster cluster.yaml --calibrate
"""


def parser() -> ArgumentParser:
    parser = show.new_parser("plan", "Compare all strategies on a cluster, by memory and time.", EXAMPLES)
    target.add_arguments(parser)
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="FILE",
        help="the cluster: a YAML file, or N nodes of 8: a100xN, h100xN, h200xN, b200xN, mi300xxN",
    )
    parser.add_argument(
        "--calibrate", action="store_true", help="time a few updates here, on such a GPU, and scale to it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def run(args: Namespace) -> int:
    """Print the plan; 2 if no layout fits."""
    from forge_cluster.planning.hardware import load_cluster

    cluster = load_cluster(args.cluster)  # refused before anything slow is imported
    recipe = target.load(args, to_train=True)
    found = plan(args, cluster, recipe)
    if args.json:
        print(json.dumps({"recipe": recipe.name, **as_json(found, args, recipe)}, indent=2))
    else:
        show_plan(found, args, recipe)
    return 0 if found.best else 2


def plan(args: Namespace, cluster: Cluster, recipe: Recipe) -> ClusterPlan:
    from forge_cluster.planning import calibrated_cluster, count_workload, plan_cluster

    if args.calibrate:
        cluster = calibrated_cluster(cluster, recipe)
    return plan_cluster(count_workload(recipe), cluster)


def show_plan(found: ClusterPlan, args: Namespace, recipe: Recipe) -> None:
    """Print the table, the best three with reasons and commands, and what failures cost."""
    console, cluster = show.console(), found.cluster
    console.print(
        Text.assemble(
            (f"{cluster.nodes} × {cluster.gpus_per_node} {cluster.name}", "bold"),
            f", {cluster.memory / 2**30:.4g} GiB each; {found.batch} samples an update; "
            f"{found.considered:,} layouts compared",
        ),
        soft_wrap=True,
    )
    if found.rows:
        grid = show.table("strategy", "with", "micro", "GiB", "compute", "waits", "bubble", "ms", "samples/s")
        for column in grid.columns[2:]:
            column.justify = "right"
        for row in found.rows:
            style = "bold" if row in found.best else "" if row.fits else "dim"
            grid.add_row(Text(row.layout.label, style), row.layout.levers, *_numbers(row, found), style=style)
        console.print(grid)
        console.print(
            Text("GiB: predicted on the fullest GPU; dim: above 80 % of its memory. Times in ms an update.", "dim"),
            soft_wrap=True,
        )
    for line in found.notes:
        console.print(Text(line, "dim"), soft_wrap=True)
    for rank, (row, reason) in enumerate(zip(found.best, found.reasons, strict=True)):
        console.print()
        console.print(
            Text.assemble(
                (f"{rank + 1}. {row.layout.label} {row.layout.levers}".rstrip(), "bold green"),
                f": {_speed(found, rank)}; {reason}.",
            ),
            soft_wrap=True,
        )
        console.print(Text(f"  {command(row.layout, found, args, recipe)}"), soft_wrap=True)
    if any(row.layout.tensor > 1 for row in found.best):
        console.print()
        console.print("tensor_parallel divides the layers that tensor_parallel.plan names: add it to the command.")
    if found.best:
        console.print()
        for line in _expected(found):
            console.print(Text(line), soft_wrap=True)
        _show_published(console, found)
        _show_shares(console, found)


def _speed(found: ClusterPlan, rank: int) -> str:
    """Say how fast one of the best is, eager and compiled, and how far off that may be."""
    unit = "tokens/s and GPU" if found.length else "samples/s and GPU"
    each = found.batch * (found.length or 1) / found.cluster.gpus
    kinds = ["eager", "compiled"]
    now, other = kinds[found.compiled], kinds[not found.compiled]
    text = f"{each / found.best[rank].seconds:,.4g} {unit} {now} ± {found.error:.0%}"
    return text if found.other is None else f"{text} ({each / found.other[rank]:,.4g} {other})"


def _show_published(console: Any, found: ClusterPlan) -> None:
    console.print()
    if not found.near:
        console.print(Text("Published runs are language models: for this task no error is known.", "dim"))
        return
    console.print("Published runs nearest to this one, predicted without having seen them:")
    grid = show.table("run", "tokens/s and GPU", "predicted", "error", "source")
    for row in found.near:
        shown = f"{row.tokens:,.4g}", f"{row.predicted:,.4g}", f"{row.ratio - 1:+.0%}"
        grid.add_row(row.label, *shown, row.source)
    console.print(grid)


def _show_shares(console: Any, found: ClusterPlan) -> None:
    console.print()
    console.print("What the times start from:")
    for name, share in found.cluster.shares.items():
        console.print(Text(f"  {name} {share.value:.3g}, {share.how}: {share.source}", "dim"), soft_wrap=True)


def _numbers(row: Prediction, found: ClusterPlan) -> list[str]:
    time = row.timing
    parts = [time.compute, time.exposed, time.bubble, time.total]
    return [
        str(row.layout.micros),
        f"{row.memory / 2**30:.1f}",
        *(f"{1000 * part:,.0f}" if part >= 0.01 else f"{1000 * part:.2f}" for part in parts),
        f"{found.batch / time.total:,.4g}",
    ]


def _expected(found: ClusterPlan) -> list[str]:
    expected = found.goodput
    lines = [f"Model FLOP utilisation of the first: {found.mfu[0]:.1%}."]
    if found.straggling > 1.001:
        lines[0] += f" Ranks that differ by {found.cluster.jitter:.1%} make it {found.straggling - 1:.1%} slower."
    if expected is not None and math.isfinite(expected.interval):
        lines.append(
            f"Failures: {expected.failures_per_day:.2g} a day. Goodput {expected.share:.1%} with a checkpoint every "
            f"{_duration(expected.interval)} (simulated; Young {_duration(expected.young)}, "
            f"Daly {_duration(expected.daly)})."
        )
    return lines


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def as_json(found: ClusterPlan, args: Namespace, recipe: Recipe) -> dict[str, Any]:
    """Return the plan as plain data: bytes and seconds."""
    expected = found.goodput
    finite = expected is not None and math.isfinite(expected.interval)
    return {
        "cluster": found.cluster.name,
        "gpus": found.cluster.gpus,
        "batch": found.batch,
        "considered": found.considered,
        "rows": [_row(row) for row in found.rows],
        "best": [
            {
                **_row(row),
                "why": reason,
                "mfu": mfu,
                "speed": _speed(found, rank),
                "command": command(row.layout, found, args, recipe),
            }
            for rank, (row, reason, mfu) in enumerate(zip(found.best, found.reasons, found.mfu, strict=True))
        ],
        "goodput": {
            "share": expected.share,
            "checkpoint_seconds": expected.interval if finite else None,
            "young_seconds": expected.young if finite else None,
            "daly_seconds": expected.daly if finite else None,
            "failures_per_day": expected.failures_per_day,
            "straggling": found.straggling,
        }
        if expected is not None
        else None,
        "error": found.error,
        "compiled": found.compiled,
        "published": [
            {"run": row.label, "source": row.where, "tokens_per_second_gpu": row.tokens, "predicted": row.predicted}
            for row in found.near
        ],
        "shares": {name: share._asdict() for name, share in found.cluster.shares.items()},
        "notes": found.notes,
    }


def _row(row: Prediction) -> dict[str, Any]:
    layout, time = row.layout, row.timing
    return {
        "strategy": layout.label,
        "data": layout.data,
        "shard": layout.shard,
        "replicate": layout.replicate,
        "tensor": layout.tensor,
        "context": layout.context,
        "pipeline": layout.pipeline,
        "schedule": layout.schedule,
        "micro_batches": layout.micros,
        "precision": layout.variant.precision,
        "remat": layout.variant.remat,
        "memory": round(row.memory),
        "fits": row.fits,
        "seconds": time.total,
        "compute": time.compute,
        "exposed": time.exposed,
        "hidden": time.hidden,
        "bubble": time.bubble,
    }


def command(layout: Layout, found: ClusterPlan, args: Namespace, recipe: Recipe) -> str:
    """Return the command that trains with a layout, on one node or under torchrun."""
    from forge.contract import axes
    from forge_cluster.planning.combining import KEPT, plugins_of
    from forge_cluster.planning.workload import APART

    wanted = plugins_of(layout)
    options = {f"{name}.{key}": value for name, own in wanted.items() for key, value in own.items()}
    changes: dict[str, Any] = {}
    if "accumulate" in wanted:
        changes["data.batch_size"] = found.batch // layout.micros
    if layout.data_ranks != layout.gpus or layout.replicate > 1:
        name, _, options[name] = axes.shown(layout.mesh).partition("=")
    if "goodput" in recipe.plugins and found.goodput is not None and math.isfinite(found.goodput.interval):
        options["goodput.promised"] = round(found.goodput.share, 4)
    given = [name for name in args.plugins if name.removeprefix("no:") not in APART]
    there = {name for name in recipe.plugins if name in given or name not in args.plugins}
    removed = [f"no:{name}" for name in APART if name in there and name not in (*wanted, *KEPT)]
    words = ["fit", *target.same_target(args, {**changes, **options}, plugins=())]
    cluster = found.cluster
    if cluster.nodes > 1:
        launch = ["torchrun", "--nnodes", str(cluster.nodes), "--nproc-per-node", str(cluster.gpus_per_node)]
        words = [*launch, "--rdzv-backend", "c10d", "--rdzv-endpoint", "NODE:29400", "-m", "forge", *words]
    else:
        words = ["forge", *words, *(["--nproc", str(cluster.gpus)] if cluster.gpus > 1 else [])]
    for name in (*given, *removed, *(name for name in wanted if name not in there)):
        words += ["-p", name]
    return shlex.join(words)
