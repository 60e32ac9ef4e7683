"""`forge plan --devices N --memory G`: print the memory of each strategy, and the command to run."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forge import registry
from forge.cli import target
from forge.errors import ForgeError
from forge.util import show
from forge.util.text import format_bytes

if TYPE_CHECKING:
    from forge.config import Recipe
    from forge.planning import MemoryPlan, StrategyRow

STYLES = {"yes": "green", "barely": "yellow", "no": "red"}
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary", "peak")


def plan(args: Namespace, recipe: Recipe) -> MemoryPlan:
    from forge.planning import device_memory, plan_memory

    devices = 1 if args.devices is None else args.devices
    if devices < 1:
        raise ForgeError(f"--devices is {devices}; it must be at least 1.")
    if args.memory is not None and args.memory <= 0:
        raise ForgeError(f"--memory is {args.memory:g}; give the GiB of each device, as in --memory 80.")
    memory = device_memory() if args.memory is None else round(args.memory * 2**30)
    return plan_memory(recipe, devices, memory)


def show_plan(found: MemoryPlan, args: Namespace, recipe: Recipe) -> None:
    """Print the table, its notes and the advice."""
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
        sizes = [format_bytes(getattr(row, part)) for part in PARTS]
        name = f"≈ {row.strategy}" if row.is_estimate else row.strategy
        chosen = "bold" if row is found.advice.row else ""
        grid.add_row(Text(name, chosen), " + ".join(row.levers), str(row.samples), *sizes, Text(fits, STYLES[fits]))
    console.print(grid)
    for line in _notes(found):
        console.print(Text(line, "dim"), soft_wrap=True)
    console.print()
    row = found.advice.row
    advice = Text.assemble(("Recommended: ", "bold"), (label(row), "bold green"), ", because ") if row else Text("")
    reason = found.advice.reason
    console.print(advice.append(reason if row else reason[0].upper() + reason[1:]).append("."), soft_wrap=True)
    if row is not None:
        console.print(Text(f"  {command(row, found, args, recipe)}"), soft_wrap=True)


def as_json(found: MemoryPlan, args: Namespace, recipe: Recipe) -> dict[str, Any]:
    """Return the plan as plain data; sizes in bytes."""
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
                **_switches(row, found),
                "samples": row.samples,
                **{part: getattr(row, part) for part in PARTS},
                "fits": fit(row.peak, found.memory),
                "estimate": row.is_estimate,
            }
            for row in found.rows
        ],
        "recommended": None
        if row is None
        else {"strategy": row.strategy, **_switches(row, found), "command": command(row, found, args, recipe)},
        "reason": found.advice.reason,
        "notes": found.notes,
    }


def _switches(row: StrategyRow, found: MemoryPlan) -> dict[str, bool]:
    return {name: name in row.levers for name in found.levers}


def command(row: StrategyRow, found: MemoryPlan, args: Namespace, recipe: Recipe) -> str:
    """Return the command that trains with a row's strategy."""
    strategies = {*registry.installed("strategy"), *(name for row in found.rows for name in row.plugins)}
    words = ["forge", "fit", *target.same_target(args, plugins=())]
    words += ["--nproc", str(found.devices)] if found.devices > 1 and row.plugins else []
    given = [name for name in args.plugins if name not in strategies]
    there = {name for name in recipe.plugins if name in given or name not in args.plugins}
    wanted = [*row.plugins, *row.levers]
    removed = [f"no:{name}" for name in sorted(strategies) if name in there and name not in wanted]
    for name in (*given, *removed, *(name for name in wanted if name not in there)):
        words += ["-p", name]
    for name, options in row.plugins.items():
        words += [f"{name}.{key}={json.dumps(value)}" for key, value in options.items()]
    return shlex.join(words)


def _notes(found: MemoryPlan) -> list[str]:
    from forge.planning import WORKSPACE

    lines = [
        "peak: allocated by torch at the worst moment of an update, when not all parts are present in full; temporary "
        f"is the rest, with {format_bytes(WORKSPACE)} of workspaces for cuBLAS. The CUDA context, NCCL and "
        "fragmentation are not included: above 80 % it barely fits."
    ]
    if any(row.is_estimate for row in found.rows):
        lines.append("≈: an estimate, by formula from the counted numbers.")
    return [*lines, *found.notes]
