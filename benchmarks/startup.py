"""Start-up: CPU time of importing a framework in a new process, over `import torch` alone.

    python -m benchmarks.startup                   # everything installed, 15 rounds, about 4 minutes
    python -m benchmarks.startup --rounds 3 --json # one JSON object per line: the machine, then the rows

The processes run in sequence, round after round in the same order, so that drift of the machine affects all alike.
The figure is user + system time of the process (`getrusage` of the children), the median over rounds; the ratio is the
median over rounds of the ratio to `import torch` in the same round. "quiet" is the ratio of the fastest fifth of the
rounds, for shared machines. One unmeasured round fills the file cache and writes the .pyc files.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import mean, median

from rich.table import Table

from benchmarks import machine
from benchmarks.command_line import some_of

PROGRAMS = {
    "torch": ("torch", "import torch"),
    "forge": ("forge", "import forge; forge.Trainer; forge.TaskModule"),
    "lightning": ("lightning", "import lightning.pytorch"),
    "accelerate": ("accelerate", "import accelerate"),
}
"""Name → the required module, and the timed program; the first is the baseline."""


@dataclass(frozen=True, slots=True)
class Row:
    """One program; times are CPU seconds of the whole process."""

    name: str
    program: str
    cpu_s: float
    ratio: float
    ratio_quiet: float
    rounds: int


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    rows = measure(_installed(options.only), options.rounds)
    machine.show(rows, table, options.json)
    return 0


def measure(programs: dict[str, str], rounds: int) -> list[Row]:
    for program in programs.values():
        cpu_seconds(program)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            times[name].append(cpu_seconds(program))
    base = next(iter(times.values()))
    return [_row(name, programs[name], own, base) for name, own in times.items()]


def cpu_seconds(program: str) -> float:
    """Return user + system time of a new interpreter that runs `program`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # as after an installation: without bytecode files a framework would be compiled every time
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise RuntimeError(f"`{program}` failed:\n{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def table(rows: list[Row]) -> Table:
    shown = Table(title=f"start-up, {rows[0].rounds} rounds")
    shown.add_column("program", no_wrap=True)
    for heading in ("CPU s", "ratio", "quiet"):
        shown.add_column(heading, justify="right")
    for row in rows:
        shown.add_row(row.program, f"{row.cpu_s:.3f}", f"{row.ratio:.3f}×", f"{row.ratio_quiet:.3f}×")
    return shown


def _row(name: str, program: str, own: list[float], base: list[float]) -> Row:
    least = max(1, len(own) // 5)
    return Row(
        name=name,
        program=program,
        cpu_s=round(median(own), 3),
        ratio=round(median(mine / theirs for mine, theirs in zip(own, base, strict=True)), 4),
        ratio_quiet=round(mean(sorted(own)[:least]) / mean(sorted(base)[:least]), 4),
        rounds=len(own),
    )


def _installed(names: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, (module, program) in PROGRAMS.items():
        if name not in names:
            continue
        if find_spec(module) is not None:
            found[name] = program
        else:
            print(f"{name}: not installed, left out", file=sys.stderr)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    parser.add_argument("--rounds", type=int, default=15, help="processes of each kind (default 15)")
    parser.add_argument("--only", type=some_of(PROGRAMS), default=",".join(PROGRAMS), help="the first is the base")
    return parser


if __name__ == "__main__":
    sys.exit(main())
