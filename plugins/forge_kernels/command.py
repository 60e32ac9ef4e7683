"""List installed kernels, show one's contract, or measure them."""

from __future__ import annotations

import inspect
import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from forge import registry
from forge.errors import ForgeError, did_you_mean
from forge.util import show

if TYPE_CHECKING:
    from forge_kernels.bench import Bench, BenchRow
    from forge_kernels.contract import Kernel

BENCH = "bench"
EXAMPLES = """\
examples:
  forge kernels
  forge kernels layer_norm
  forge kernels bench layer_norm softmax --against compile
  forge kernels bench --dtype bfloat16,float32 --json > kernels.jsonl
"""
AGAINST = ("eager", "compile")


def parser() -> ArgumentParser:
    parser = show.new_parser(
        "kernels", "List installed kernels, show one's contract, or measure them (bench).", EXAMPLES
    )
    parser.add_argument("words", metavar="NAME", nargs="*", help="a kernel to show; or bench, and kernels to measure")
    parser.add_argument("--case", metavar="TEXT", help="bench: only cases whose name contains this")
    parser.add_argument(
        "--dtype",
        metavar="NAMES",
        help="bench: float32, bfloat16, float16, with commas between (default: bfloat16)",
    )
    parser.add_argument(
        "--against",
        metavar="NAMES",
        default=",".join(AGAINST),
        help="bench: eager (torch's own), compile (torch.compile of the reference); none for the kernels alone",
    )
    parser.add_argument("--quick", action="store_true", help="bench: a tenth of the time, for a first look")
    parser.add_argument(
        "--interpret", action="store_true", help="bench: in Triton's interpreter, on a CPU; it times nothing real"
    )
    parser.add_argument("--json", action="store_true", help="bench: print one JSON object per line instead")
    return parser


def run(args: Namespace) -> int:
    if args.words[:1] == [BENCH]:
        return _bench(args)
    for option in ("case", "dtype", "quick", "interpret", "json"):
        if getattr(args, option):
            raise ForgeError(f"--{option} is for measuring: forge kernels bench {' '.join(args.words)} --{option}")
    if len(args.words) > 1:
        raise ForgeError(f"forge kernels shows one kernel at a time, and got {', '.join(args.words)}.")
    return _show(args.words[0]) if args.words else _list()


# ---------------------------------------------------------------------------------------------------------------------
# List and show


def _list() -> int:
    """Import and list all kernels; a package that fails to import gets its error as its row."""
    from forge_kernels import discovery as kernels

    grid = show.table("kernel", "what it computes", "dtypes", "replaces", "package", wrap=["what it computes"])
    for name in kernels.names():
        origin = registry.origin(registry.installed("kernel")[name])
        try:
            kernel = kernels.load(name)
        except ForgeError as error:
            grid.add_row(name, Text(str(error), "red"), "", "", origin)
            continue
        grid.add_row(name, Text(kernel.summary), _dtypes(kernel), _replaces(kernel), origin)
    console = show.console()
    console.print(grid if kernels.names() else Text("no kernels", "dim"))
    console.print(
        "\nforge kernels NAME shows one; forge kernels bench measures them; forge fit RECIPE -p kernels uses them.",
        style="dim",
    )
    return 0


def _dtypes(kernel: Kernel) -> str:
    from forge_kernels.contract import dtype_name

    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    names = [dtype_name(dtype) for dtype in kernel.tolerance]
    return " ".join(short.get(name, name) for name in names)


def _replaces(kernel: Kernel) -> Text:
    """The last part of each replaced name: layer_norm, LayerNorm."""
    from forge_kernels.contract import Subgraph

    names = [replaced.target.rpartition(".")[2] for replaced in kernel.replaces if not isinstance(replaced, Subgraph)]
    names += ["calls in a compiled step"] if any(isinstance(r, Subgraph) for r in kernel.replaces) else []
    return Text(", ".join(names)) if names else Text("-", "dim")


def _show(name: str) -> int:
    from forge_kernels import discovery as kernels
    from forge_kernels.contract import Subgraph, dtype_name

    kernel = kernels.load(name)
    entry = registry.installed("kernel")[name]
    console = show.console()
    console.print(Text.assemble((name, "bold"), (f"  {registry.origin(entry)}, {entry.value}", "dim")), soft_wrap=True)
    console.print(Text(kernel.summary))
    console.print()
    documented = inspect.getdoc(kernel.function)
    signature = str(inspect.signature(kernel.function)).replace("'", "")
    call = f"{kernel.function.__module__}.{kernel.function.__qualname__}"
    console.print(Text(f"{call}{signature}", "cyan"), soft_wrap=True)
    if documented:
        console.print(Text(documented))
    console.print()
    grid = show.table("what it promises", "")
    for dtype, bound in kernel.tolerance.items():
        grid.add_row(f"error in {dtype_name(dtype)}", f"at most {bound:g} of the norm, against float64")
    for replaced in kernel.replaces:
        ends = "in a compiled step, calls that end in " if isinstance(replaced, Subgraph) else ""
        grid.add_row("replaces", Text(ends + replaced.target))
    if not kernel.replaces:
        grid.add_row("replaces", "nothing by itself: call it in your task")
    grid.add_row("reference", Text(_place(kernel.reference)))
    grid.add_row("version", kernels.version(kernel))
    console.print(grid)
    console.print()
    grid = show.table("case", "options", "least work", "", "operations per byte")
    for case in kernel.cases:
        grid.add_row(Text(case.name), ", ".join(f"{k}={v}" for k, v in case.options.items()), *_cost(kernel, case))
    console.print(grid)
    return 0


def _cost(kernel: Kernel, case: Any) -> list[str]:
    """Return the least work of a case, computed from shapes only."""
    import torch

    def digits(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    dtype = torch.bfloat16 if torch.bfloat16 in kernel.tolerance else next(iter(kernel.tolerance))
    try:
        cost = kernel.cost(*case.make(torch.device("meta"), dtype), **case.options)
    except Exception:  # e.g. arguments made from values
        return ["?", "", ""]
    each = cost.flops / max(cost.bytes, 1)
    return [f"{digits(cost.flops / 1e9)} GFLOP", f"{digits(cost.bytes / 1e6)} MB", digits(each)]


def _place(function: Callable[..., Any]) -> str:
    function = inspect.unwrap(function)
    try:
        file, line = inspect.getsourcefile(function), inspect.getsourcelines(function)[1]
    except (OSError, TypeError):
        return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"
    return f"{show.near(file)}:{line}" if file else "?"  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------------------------------------------------------------
# Measure


def _bench(args: Namespace) -> int:
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are imported
    from forge_kernels import bench as benching

    kernels = _picked(args.words[1:])
    dtypes = args.dtype.split(",") if args.dtype else None
    for dtype in dtypes or ():
        if dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise ForgeError(f"--dtype has {dtype!r}.{did_you_mean(dtype, ['float32', 'bfloat16', 'float16'])}")
    against = [] if args.against == "none" else args.against.split(",")
    for name in against:
        if name not in AGAINST:
            raise ForgeError(f"--against has {name!r}.{did_you_mean(name, [*AGAINST, 'none'])}")
    if args.case is not None and not any(args.case in case.name for kernel in kernels for case in kernel.cases):
        known = sorted({case.name for kernel in kernels for case in kernel.cases})
        raise ForgeError(f"--case: no case has {args.case!r} in its name.{did_you_mean(args.case, known)}")
    bench = benching.Bench(against=against, quick=args.quick)
    rows = _rows(bench, kernels, args.case, dtypes, as_json=args.json)
    if not args.json:
        _print(bench, rows)
    return 0 if all(row.holds for row in rows) else 1


def _picked(names: Sequence[str]) -> list[Kernel]:
    """Load the named kernels, or by default all that can be imported."""
    from forge_kernels import discovery as kernels

    if names:
        return [kernels.load(name) for name in names]
    found: list[Kernel] = []
    for name in kernels.names():
        try:
            found.append(kernels.load(name))
        except ForgeError as error:
            show.warning(str(error))
    return found


def _rows(
    bench: Bench, kernels: Sequence[Kernel], case: str | None, dtypes: Sequence[str] | None, as_json: bool
) -> list[BenchRow]:
    """Measure all rows; print each as JSON at once, or a progress line per kernel."""
    rows: list[BenchRow] = []
    if as_json:
        print(json.dumps({"machine": bench.describe()}), flush=True)
    for kernel in kernels:
        if case is not None and not any(case in known.name for known in kernel.cases):
            continue
        if not as_json:
            show.message(f"measuring {kernel.name}", "dim")
        for row in bench.rows(kernel, case, dtypes):
            rows.append(row)
            if as_json:
                print(json.dumps(asdict(row)), flush=True)
    return rows


def _print(bench: Bench, rows: Sequence[BenchRow]) -> None:
    console = show.console()
    machine = bench.describe()
    console.print(
        Text(
            f"{machine['device']}: {machine['copy_bytes_per_s'] / 1e12:.2f} TB/s copied, "
            f"{machine['bf16_flops_per_s'] / 1e12:.0f} TFLOP/s in bfloat16, both measured now; "
            f"torch {machine['torch']}, triton {machine['triton']}"
        ),
        soft_wrap=True,
    )
    console.print("Forward and backward, medians, caches cold. Roofline: share of the larger of the two.", style="dim")
    console.print()
    console.print(table_of(rows))
    for row in rows:
        if not row.holds:
            off = f"is off by {row.error:.1e}; it promises {row.tolerance:g}."
            show.warning(f"{row.kernel} {row.case} in {row.dtype} {off}")


def table_of(rows: Sequence[BenchRow]) -> Table:
    """Return the rows as a rich table."""
    head = ("kernel", "case", "dtype", "who", "ms", "spread", "roofline", "error", "peak MB", "note")
    grid = show.table(*head, wrap=["note"])
    for column in grid.columns[4:9]:
        column.justify = "right"
    last = None
    for row in rows:
        shown = (row.kernel, row.case, row.dtype)
        spread = None if row.ms is None else (row.ms_high or 0) / row.ms - 1
        numbers = [(row.ms, ".4g"), (spread, "+.1%"), (row.roofline, ".1%"), (row.error, ".1e"), (row.peak_mb, ",.0f")]
        grid.add_row(
            *map(Text, ("", "", "") if shown == last else shown),
            Text(row.contender, "bold" if row.contender == "forge" else ""),
            *("-" if value is None else format(value, form) for value, form in numbers),
            Text(row.note, "dim"),
        )
        last = shown
    return grid
