"""Kill a training run anywhere, fail its calls, damage its files: it resumes, and ends in the same bits.

    python -m benchmarks.faults                      # 100 runs, 20 signals, 100 damages, 50 calls, 20 logs, 50 crashes
    python -m benchmarks.faults --runs 1000 --signals 200 --damages 1000      # part of the full table: `make faults`
    python -m benchmarks.faults --only run:417       # repeat one failure by its printed seed
    python -m benchmarks.faults --json

Every run trains a small network with shuffle, dropout, batch normalisation, per-sample augmentation, accumulation 4,
clip, schedule and guard, and saves every second update. The first of every three is in float32, the second in bf16, the
third in fp16, with a loss scale that keeps overflowing and growing. A run is killed 1 to 3 times, in one of three ways:
kill -9 at a random micro-batch, at a random system call while a checkpoint is written, or at a random instant. The
number of workers (0, 2, 2 persistent) changes between attempts; the run folder and TMPDIR are on the same or on
different filesystems. After each kill every checkpoint under a final name must verify (torn), and the newest published
one must still exist (lost). At the end every update of every attempt and the final weights are compared with an
uninterrupted run (inexact). An attempt that takes two minutes is killed (hang).

    run     killed, as above
    signal  SIGTERM, SIGINT or SIGUSR1 at a random instant: the run must exit with 85 and resume to the same bits
    damage  a flipped bit, a truncation, a zeroed range or a deletion in the newest checkpoint: it must be detected
            before use, and the previous checkpoint used instead (missed)
    log     metrics.jsonl or texts.jsonl with a bad byte, a torn or deeply nested line, garbage, or replaced by a link,
            a pipe or a folder, between two attempts: the run resumes, and every good line stays
    io      the n-th open, read, write, rename or fsync below the run folder fails with EIO or ENOSPC, once or for good
            (failing disk: all of them): the run ends, or fails with an error that names the file; then it resumes
    crash   the folder as a crash of the machine may leave it: after any prefix of the recorded changes, less the data
            and the names that were not flushed; what was published and flushed must be there

Attempts are forked from a process that has torch loaded, so a thousand runs take minutes. For io and crash this program
restarts itself with a small library preloaded, which it compiles with cc (Linux only).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import selectors
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.fault_kinds import preload
from benchmarks.fault_kinds.crash_states import crash_state
from benchmarks.fault_kinds.damages import damaged_file
from benchmarks.fault_kinds.io_faults import failing_call
from benchmarks.fault_kinds.kills import killed_run, signalled_run
from benchmarks.fault_kinds.logs import damaged_log
from benchmarks.fault_kinds.outcomes import KINDS, Outcome, Straight
from benchmarks.fault_kinds.victim import Attempt, Run, train_attempt

CASES: dict[str, Callable[[int, Straight], Outcome]] = {
    "run": killed_run,
    "signal": signalled_run,
    "damage": damaged_file,
    "log": damaged_log,
    "io": failing_call,
    "crash": crash_state,
}
PRELOADED = ("io", "crash")
"""Kinds that need the library."""


def run_cases(
    names: Sequence[str], folder: Path, report: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Run cases such as "run:12" in sequence."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        train_attempt(Attempt("0 workers"), Path(scratch), Run(0, "fp16"))  # load everything before the first fork
    straight, outcomes = Straight(folder), []
    for name in names:
        kind, _, number = name.partition(":")
        outcomes.append(CASES[kind](int(number), straight))
        report(outcomes[-1])
    return outcomes


def _in_parallel(names: Sequence[str], jobs: int, report: Callable[[Outcome], None]) -> list[Outcome]:
    """Split the cases over forked processes; each writes its outcomes as JSON lines into a pipe."""
    readers = []
    for job in range(jobs):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(reader)
            with tempfile.TemporaryDirectory(prefix="forge-faults-") as folder, os.fdopen(writer, "w") as out:

                def send(outcome: Outcome, out: Any = out) -> None:
                    out.write(json.dumps(asdict(outcome)) + "\n")
                    out.flush()

                try:
                    run_cases(names[job::jobs], Path(folder), send)
                except BaseException:
                    traceback.print_exc()
                    shutil.rmtree(folder, ignore_errors=True)
                    os._exit(1)
            os._exit(0)
        os.close(writer)
        readers.append(os.fdopen(reader))
    outcomes = []
    ready = selectors.DefaultSelector()
    for file in readers:
        ready.register(file, selectors.EVENT_READ)
    while ready.get_map():
        for key, _ in ready.select():
            line = key.fileobj.readline()  # pyright: ignore[reportAttributeAccessIssue]
            if not line:
                ready.unregister(key.fileobj)
                continue
            outcomes.append(Outcome(**json.loads(line)))
            report(outcomes[-1])
    for _ in readers:
        os.wait()
    return outcomes


def table(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row per kind of case."""
    rows = []
    for row in sorted({outcome.row for outcome in outcomes}):
        mine = [outcome for outcome in outcomes if outcome.row == row]
        kinds = Counter(outcome.kind for outcome in mine)
        counts = {kind: kinds[kind] for kind in KINDS}
        rows.append({"row": row, "cases": len(mine), "deaths": sum(o.deaths for o in mine), **counts})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100, help="killed runs (default: %(default)s)")
    parser.add_argument("--signals", type=int, default=20, help="signalled runs (default: %(default)s)")
    parser.add_argument("--damages", type=int, default=100, help="damaged checkpoints (default: %(default)s)")
    parser.add_argument("--logs", type=int, default=20, help="damaged logs (default: %(default)s)")
    parser.add_argument("--io", type=int, default=50, help="failing calls (default: %(default)s)")
    parser.add_argument("--crashes", type=int, default=50, help="crashes of the machine (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="CASE", help="just this case, as printed: run:17, signal:3")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    logging.getLogger("forge").setLevel(logging.CRITICAL)  # skipped checkpoints are expected
    counts = {"run": args.runs, "signal": args.signals, "damage": args.damages}
    counts |= {"log": args.logs, "io": args.io, "crash": args.crashes}
    names = args.only or [f"{kind}:{args.first + i}" for kind, count in counts.items() for i in range(count)]
    if any(name.partition(":")[0] in PRELOADED for name in names):
        preload.restart("benchmarks.faults", words)
    done = 0

    def report(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if outcome.wrong:
            print(f"\n{outcome.case} {outcome.kind}: {outcome.wrong}", file=sys.stderr)
        elif sys.stderr.isatty():
            print(f"\r{done} of {len(names)}", end="", file=sys.stderr)

    outcomes = _in_parallel(names, min(args.jobs, len(names)), report)
    rows = table(outcomes)
    if args.json:
        print(json.dumps({"machine": machine.describe()}))
        for row in rows:
            print(json.dumps(row))
    else:
        print(f"\n{machine.sentence()}")
        for row in rows[:1]:
            print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
        for row in rows:
            print("| " + " | ".join(str(value) for value in row.values()) + " |")
    bad = [outcome.case for outcome in outcomes if outcome.wrong]
    if bad:
        print("again with: " + " ".join(f"--only {case}" for case in bad), file=sys.stderr)
    return 1 if bad or len(outcomes) != len(names) else 0


if __name__ == "__main__":
    sys.exit(main())
