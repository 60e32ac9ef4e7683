"""Host overhead: CPU time that a framework adds to each optimizer update over a hand-written loop.

    python -m benchmarks.overhead                                  # everything installed, about 15 minutes
    python -m benchmarks.overhead --peers none                     # forge and the bare loop only
    python -m benchmarks.overhead --case mlp --peers lightning,ignite --updates 100 --rounds 5
    python -m benchmarks.overhead --json > overhead.jsonl          # one JSON object per line: machine, then rows
    python -m benchmarks.overhead --peers none --updates 20 --rounds 1 --json     # smoke test, seconds

All contenders run in one process in turn, round after round, so that drift of the machine affects them alike: one
thread, oneDNN off (it selects its kernels at run time), the same weights and the same batches in memory. The figure is
CPU time (`time.process_time`, all threads of the process) per update between two batches of one run, without set-up and
the first updates.

"over bare" is the median over rounds of the difference to the bare loop of the same round, "±" half the distance
between its quartiles. Other users of a machine only add time, for a millisecond or for minutes, so "quiet" is the mean
over updates of the first decile of each update over all rounds: trust it when "±" is large. A log every 50 updates is
at the same update in every round, so both include it; a progress bar redrawn by time is only in the first. The row
"bare again" shows the noise. "identical" is whether the trained weights equal the bare loop's bit for bit, in every
round.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import machine, peers
from benchmarks.cases import CASES, Batch, Batches, Case
from benchmarks.command_line import some_of
from benchmarks.contenders import BARE, Contender
from benchmarks.ours import OURS

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one case; times are CPU microseconds per optimizer update."""

    case: str
    contender: str
    us_per_update: float
    us_over_bare: float
    us_spread: float
    ratio: float
    us_over_bare_quiet: float
    ratio_quiet: float
    weights_identical: bool
    updates: int
    rounds: int
    note: str


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # some contenders would use a GPU
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    talk = Console(stderr=True)
    contenders = [*BARE, *OURS, *_wanted_peers(options.peers, talk)]
    if options.json:
        print(json.dumps({"machine": machine.describe()}), flush=True)
    else:
        print(machine.sentence(), *(f"  {each.name}: {each.note}" for each in contenders), sep="\n")
    for name in options.case:
        rows = run_case(CASES[name], contenders, options.updates, options.rounds, talk)
        if options.json:
            for row in rows:
                print(json.dumps(asdict(row)), flush=True)
        else:
            Console(width=None if sys.stdout.isatty() else 120).print(table(CASES[name], rows))
    return 0


def run_case(case: Case, contenders: list[Contender], updates: int, rounds: int, talk: Console) -> list[Row]:
    """Run all contenders in turn, `rounds` times, each round starting with another; the first is the baseline."""
    pool, updates = case.pool(), case.timed(updates)
    reference = run_once(contenders[0], case, pool, updates).weights
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for place in range(len(contenders)):
            contender = contenders[(number + place) % len(contenders)]
            if talk.is_terminal:  # a line, not a spinner: a spinner's thread would be in the CPU time
                talk.print(f"{case.name}: round {number + 1} of {rounds}, {contender.name:<30}", end="\r")
            runs[contender.name].append(run_once(contender, case, pool, updates))
    bare = runs[contenders[0].name]
    return [_row(case, contender, runs[contender.name], bare, reference) for contender in contenders]


@dataclass(frozen=True, slots=True)
class Run:
    """CPU microseconds per update, in total and for each, and the trained weights of one run."""

    updates: int
    microseconds: float
    each: list[float]
    weights: Weights


def run_once(contender: Contender, case: Case, pool: list[Batch], updates: int) -> Run:
    batches = Batches(pool, case, updates)
    gc.collect()
    gc.freeze()  # a full collection should skip objects from the imports of other contenders
    with tempfile.TemporaryDirectory() as folder, silence(), mock.patch.dict(os.environ, contender.environ):
        network = contender.train(case, batches, Path(folder))
    gc.unfreeze()
    weights = {name: value.detach().clone() for name, value in network.state_dict().items()}
    return Run(updates, batches.microseconds(), batches.each(), weights)


def same(weights: Weights, reference: Weights) -> bool:
    return weights.keys() == reference.keys() and all(torch.equal(weights[name], reference[name]) for name in weights)


class NullTerminal(io.TextIOBase):
    """A fake terminal: progress bars draw as for a user, and the text is discarded."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Hide progress bars, warnings and log records; the bars are still drawn."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(NullTerminal()))
        stack.enter_context(contextlib.redirect_stderr(NullTerminal()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, logging.NOTSET)
        yield


def table(case: Case, rows: list[Row]) -> Table:
    """Return the rows of one case as a rich table."""
    first = rows[0]
    shown = Table(title=f"{case.name}: {case.note}\n{first.rounds} rounds of {first.updates} updates")
    shown.add_column("", no_wrap=True)
    for heading in ("µs/update", "over bare", "±", "ratio", "quiet over", "quiet ratio"):
        shown.add_column(heading, justify="right")
    shown.add_column("identical")
    for row in rows:
        median = f"{row.us_per_update:,.0f}", f"{row.us_over_bare:+,.0f}", f"{row.us_spread:,.0f}", f"{row.ratio:.3f}×"
        quiet = f"{row.us_over_bare_quiet:+,.0f}", f"{row.ratio_quiet:.3f}×"
        shown.add_row(row.contender, *median, *quiet, "yes" if row.weights_identical else "NO")
    return shown


def _row(case: Case, contender: Contender, own: list[Run], bare: list[Run], reference: Weights) -> Row:
    pairs = [(mine.microseconds, base.microseconds) for mine, base in zip(own, bare, strict=True)]
    over = [mine - base for mine, base in pairs]
    low, _, high = statistics.quantiles(over, n=4) if len(over) > 1 else (over[0], over[0], over[0])
    quiet, quiet_bare = _quiet(own), _quiet(bare)
    return Row(
        case=case.name,
        contender=contender.name,
        us_per_update=round(statistics.median(mine for mine, _ in pairs), 1),
        us_over_bare=round(statistics.median(over), 1),
        us_spread=round((high - low) / 2, 1),
        ratio=round(statistics.median(mine / base for mine, base in pairs), 4),
        us_over_bare_quiet=round(quiet - quiet_bare, 1),
        ratio_quiet=round(quiet / quiet_bare, 4),
        weights_identical=all(same(run.weights, reference) for run in own),
        updates=own[0].updates,
        rounds=len(own),
        note=contender.note,
    )


def _quiet(runs: list[Run]) -> float:
    """Return the mean over updates of each update's first decile over rounds."""
    rounds_of_each = zip(*(run.each for run in runs), strict=True)
    return statistics.mean(sorted(times)[len(times) // 10] for times in rounds_of_each)


def _wanted_peers(names: list[str], talk: Console) -> list[Contender]:
    found: list[Contender] = []
    for name in names:
        if peers.installed(name):
            found += peers.contenders(name)
        else:
            talk.print(f"{name}: not installed, left out")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=(__doc__ or "").splitlines()[0])
    peer_names = some_of(peers.PEERS, all=list(peers.PEERS), none=[])
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of tables")
    parser.add_argument("--peers", type=peer_names, default="all", help=f"{','.join(peers.PEERS)}, all or none")
    parser.add_argument("--case", type=some_of(CASES), default=",".join(CASES), help=f"of {','.join(CASES)}")
    parser.add_argument("--updates", type=int, default=200, help="updates timed in each run (default 200)")
    parser.add_argument("--rounds", type=int, default=25, help="runs of each contender (default 25)")
    return parser


if __name__ == "__main__":
    os.environ.setdefault("TERM", "xterm-256color")
    sys.exit(main())
