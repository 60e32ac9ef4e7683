"""Milliseconds and memory of models of other packages: by hand, under Lightning and accelerate, and under forge.

    python -m benchmarks.strangers --models vit_b_16                 # one model, all rows; minutes on an H200
    python -m benchmarks.strangers --models llama --rows bare,forge  # some rows
    python -m benchmarks.strangers                                   # every model; goes on where it was interrupted
    python -m benchmarks.strangers --tiny --models lstm              # smoke test on any machine

Every row is a process of its own, in bf16 under autocast with the same optimizer and batches; the rows of one model
take turns, round after round, and the figure is the median of the rounds. Results are appended to FILE
(runs/strangers.jsonl), and a second call runs what is missing there. "kernels" is `compile` with
`kernels.use=attention`; "tuned" is what `forge tune speed` chose within three minutes from the same precision; each
model is searched once, in a process of its own, and the choice is kept in a folder (runs/strangers) for every round.
`--search` does only that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import forge
from benchmarks.command_line import some_of
from benchmarks.gpu import Batches, Case, Train, accelerated, bare, device, lightning, ours
from benchmarks.strangers_models import MODELS

MINUTES = float(os.environ.get("FORGE_TUNE_MINUTES", "3"))
"""The budget of `forge tune speed` for one model."""
CHOICES = Path("runs/strangers")
"""Where the choice for each model is kept."""


def search(case: Case, tiny: bool) -> dict[str, Any]:
    """Return the plugins that `forge tune speed --same-precision` chooses for a model."""
    base: dict[str, Any] = {"amp": {"dtype": "bf16"}} if case.bf16 else {}
    base |= {"clip": {"max_norm": case.clip}} if case.clip else {}
    batches = Batches(case, tiny)

    def make_task() -> forge.TaskModule:
        torch.manual_seed(0)
        return case.build(tiny)

    report = forge.tuning.speed_range(
        make_task,
        lambda: batches.kept,
        numbers="rounding",
        budget=MINUTES / 20 if tiny else MINUTES,
        plugins=base,
        device=device(),
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return dict(report.change.plugins)


def tuned(case: Case, batches: Batches, tiny: bool, folder: Path) -> float:
    """Train with what the search chose for this model."""
    chosen: dict[str, Any] = json.loads(_choice(case.name).read_text())
    return ours(logs=False, **chosen)(case, batches, tiny, folder)


def _choice(model: str) -> Path:
    return CHOICES / f"{model}.json"


ROWS: dict[str, tuple[str, Train]] = {
    "bare": ("hand-written loop, eager", bare(None)),
    "bare compiled": ("hand-written loop, torch.compile", bare("default")),
    "lightning": ("its defaults", lightning(True)),
    "accelerate": ("the user's loop under Accelerator, eager", accelerated),
    "forge": ("recipe default", ours(default=True)),
    "forge compiled": ("only compile", ours(logs=False, compiled=True)),
    "forge kernels": ("compile, kernels.use=attention", ours(logs=False, compiled=True, kernels={"use": "attention"})),
    "forge tuned": ("what forge tune speed chose, in the same precision", tuned),
}


@dataclass(frozen=True, slots=True)
class StrangerRow:
    """One row of one model in one round."""

    model: str
    row: str
    turn: int
    ms: float | None
    peak_gb: float | None = None
    note: str = ""


def measure(model: str, row: str, turn: int, tiny: bool) -> StrangerRow:
    """Measure one row in this process."""
    case = MODELS[model]
    batches = Batches(case, tiny)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        ROWS[row][1](case, batches, tiny, Path(folder) / "run")
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
    return StrangerRow(model, row, turn, round(statistics.median(batches.seconds) * 1e3, 3), peak and round(peak, 2))


def in_its_own_process(model: str, row: str, turn: int, tiny: bool) -> StrangerRow:
    command = [sys.executable, "-m", "benchmarks.strangers", "--one", model, row, str(turn)]
    if row == "forge tuned" and not _choice(model).exists():
        searched = [sys.executable, "-m", "benchmarks.strangers", "--search", "--models", model]
        subprocess.run([*searched, *(["--tiny"] if tiny else [])], stdout=sys.stderr)
    try:
        done = subprocess.run([*command, *(["--tiny"] if tiny else [])], capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return StrangerRow(model, row, turn, None, note="not done after 10 minutes")
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["no message"]
        return StrangerRow(model, row, turn, None, note=lines[-1][:200])
    return StrangerRow(**json.loads(done.stdout.strip().splitlines()[-1]))


def table(rows: list[StrangerRow]) -> Table:
    """Return the medians by model and row, with the speed relative to the compiled loop by hand."""
    shown = Table()
    for heading in ("model", "", "ms", "of compiled by hand", "GB", ""):
        shown.add_column(heading, justify="right" if heading in ("ms", "of compiled by hand", "GB") else "left")
    for model in dict.fromkeys(row.model for row in rows):
        best = _median([row for row in rows if row.model == model and row.row == "bare compiled"])
        for name in [name for name in ROWS if any(row.model == model and row.row == name for row in rows)]:
            own = [row for row in rows if row.model == model and row.row == name]
            ms, peak = _median(own), max((row.peak_gb or 0.0 for row in own), default=0.0)
            speed = f"{best / ms:.3f}" if best and ms else ""
            notes = next((row.note for row in own if row.note), "")
            shown.add_row(model, name, f"{ms:.2f}" if ms else "-", speed, f"{peak:.2f}" if peak else "", notes)
    return shown


def _median(rows: list[StrangerRow]) -> float | None:
    found = [row.ms for row in rows if row.ms is not None]
    return statistics.median(found) if found else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strangers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=some_of(MODELS), default=list(MODELS), help="names with commas between")
    parser.add_argument("--rows", type=some_of(ROWS), default=list(ROWS), help="names with commas between")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each row")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--out", default="runs/strangers.jsonl", metavar="FILE", help="where results are kept")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "ROW", "ROUND"), help="one row in this process, as JSON")
    parser.add_argument("--search", action="store_true", help="only choose a stack for each model, and keep it")
    options = parser.parse_args(arguments)
    if options.one:
        model, row, turn = options.one
        print(json.dumps(asdict(measure(model, row, int(turn), options.tiny))))
        return 0
    if not torch.cuda.is_available() and not options.tiny:
        print("No CUDA device is available. For a smoke test: --tiny", file=sys.stderr)
        return 2
    if options.search:
        for model in options.models:
            chosen = json.dumps(search(MODELS[model], options.tiny))
            _choice(model).parent.mkdir(parents=True, exist_ok=True)
            _choice(model).write_text(chosen)
            print(f"{model}: {chosen}", flush=True)
        return 0
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    known = [StrangerRow(**json.loads(line)) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(row.model, row.row, row.turn) for row in known}
    with out.open("a") as file:
        for model in options.models:
            for turn in range(options.rounds):
                for name in options.rows:
                    if (model, name, turn) not in done:
                        row = in_its_own_process(model, name, turn, options.tiny)
                        known.append(row)
                        print(json.dumps(asdict(row)), file=file, flush=True)
                        print(f"{model} {name}: {row.ms} ms {row.note}", file=sys.stderr, flush=True)
    wanted = [row for row in known if row.model in options.models and row.row in options.rows]
    Console(width=None if sys.stdout.isatty() else 140).print(table(wanted))
    return 0


if __name__ == "__main__":
    sys.exit(main())
