"""What `forge plan --devices N --memory G` prints: what fits, and what to run."""

from __future__ import annotations

import shlex
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forge.errors import ForgeError
from forge.util import show

if TYPE_CHECKING:
    from forge.config import Recipe
    from forge.planning import MemoryPlan, StrategyRow

STYLES = {"yes": "green", "barely": "yellow", "no": "red"}
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary", "peak")


def plan(args: Namespace, recipe: Recipe) -> MemoryPlan:
    """Plan with the numbers of the command line."""
    from forge.planning import device_memory, plan_memory

    devices = 1 if args.devices is None else args.devices
    if devices < 1:
        raise ForgeError(f"--devices is {devices}; it must be at least 1.")
    if args.memory is not None and args.memory <= 0:
        raise ForgeError(f"--memory is {args.memory:g}; say how many GiB each device has, as in --memory 80.")
    memory = device_memory() if args.memory is None else round(args.memory * 2**30)
    return plan_memory(recipe, devices, memory)


def show_plan(found: MemoryPlan, args: Namespace, recipe: Recipe) -> None:
    """The table, its small print, and the advice."""
    from forge.planning.advice import fit, label

    console = show.console()
    many = f"{found.devices} devices" if found.devices > 1 else "1 device"
    console.print(
        Text.assemble(
            (f"Memory on each of {many} of {found.memory / 2**30:.4g} GiB", "bold"),
            f", micro-batches of {found.batch} samples",
        ),
        soft_wrap=True,
    )
    grid = show.table("strategy", "with", "samples", *PARTS, "fits")
    for column in grid.columns[2:-1]:
        column.justify = "right"
    for row in found.rows:
        fits = fit(row.peak, found.memory)
        sizes = [size(getattr(row, part)) for part in PARTS]
        name = f"≈ {row.strategy}" if row.is_estimate else row.strategy
        chosen = "bold" if row is found.advice.row else ""
        grid.add_row(Text(name, chosen), str(row.levers), str(row.samples), *sizes, Text(fits, STYLES[fits]))
    console.print(grid)
    for line in _small_print(found):
        console.print(Text(line, "dim"), soft_wrap=True)
    console.print()
    row = found.advice.row
    taken = Text.assemble(("Recommended: ", "bold"), (label(row), "bold green"), ", because ") if row else Text("")
    reason = found.advice.reason
    console.print(taken.append(reason if row else reason[0].upper() + reason[1:]).append("."), soft_wrap=True)
    if row is not None:
        console.print(Text(f"  {command(row, found, args, recipe)}"), soft_wrap=True)


def as_json(found: MemoryPlan, args: Namespace, recipe: Recipe) -> dict[str, Any]:
    """The same as plain data, in bytes."""
    from forge.planning import WORKSPACE
    from forge.planning.advice import fit

    row = found.advice.row
    return {
        "devices": found.devices,
        "memory": found.memory,
        "batch": found.batch,
        "workspace": WORKSPACE,
        "rows": [
            {
                "strategy": row.strategy,
                **row.levers._asdict(),
                "samples": row.samples,
                **{part: getattr(row, part) for part in PARTS},
                "fits": fit(row.peak, found.memory),
                "estimate": row.is_estimate,
            }
            for row in found.rows
        ],
        "recommended": None
        if row is None
        else {"strategy": row.strategy, **row.levers._asdict(), "command": command(row, found, args, recipe)},
        "reason": found.advice.reason,
        "notes": found.notes,
    }


def command(row: StrategyRow, found: MemoryPlan, args: Namespace, recipe: Recipe) -> str:
    """The command line that runs a row."""
    from forge.planning.plan import STRATEGIES

    strategy, _, extra = row.strategy.partition(" + ")
    kind, _, number = extra.partition(" ")
    wanted = [] if strategy == "single" else [strategy]
    wanted += [kind] if number else []
    wanted += [name for name, on in row.levers._asdict().items() if on]
    words = ["forge", "fit", args.target, *args.overrides]
    words += ["--recipe", args.recipe] if args.recipe else []
    words += ["--data", args.data] if args.data else []
    words += ["--nproc", str(found.devices)] if found.devices > 1 and strategy != "single" else []
    given = [name for name in args.plugins if name not in STRATEGIES]
    there = {name for name in recipe.plugins if name in given or name not in args.plugins}
    removed = [f"no:{name}" for name in STRATEGIES if name in there and name not in wanted]
    for name in (*given, *removed, *(name for name in wanted if name not in there)):
        words += ["-p", name]
    if number:
        words.append(f"{kind}.size={number}")
    elif extra:
        words.append(f"{strategy}.{extra}=true")
    return shlex.join(words)


def size(number: float) -> str:
    """ "512 B", "1.50 KiB", "2.30 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} GiB" if number < 1000 else f"{number:,.0f} GiB"


def _small_print(found: MemoryPlan) -> list[str]:
    from forge.planning import WORKSPACE

    lines = [
        "peak: what torch allocates at the worst moment of an update, at which not all of the parts are there in full; "
        f"temporary holds the rest, with {size(WORKSPACE)} of workspaces for cuBLAS. Context, NCCL and fragments come "
        "on top: above 80 % it fits barely."
    ]
    if any(row.is_estimate for row in found.rows):
        lines.append("≈: an estimate, by formula from what was counted.")
    return [*lines, *found.notes]
