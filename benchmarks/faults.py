"""Kill a training run anywhere, resume it, and check that it ends in the same bits.

    python -m benchmarks.faults                      # 100 runs, 20 signals, 100 damaged files
    python -m benchmarks.faults --runs 1000 --signals 200 --damages 1000      # the full table: `make faults N=1000`
    python -m benchmarks.faults --only run:417       # repeat one failure by its printed seed
    python -m benchmarks.faults --json

Every run trains a small network with shuffle, dropout, batch normalisation, per-sample augmentation, accumulation 4,
clip, schedule and guard, and saves every second update. The first of every three is in float32, the second in bf16, the
third in fp16, with a loss scale that keeps overflowing and growing. A run is killed 1 to 3 times, in one of three ways:
kill -9 at a random micro-batch, at a random system call while a checkpoint is written, or at a random instant. The
number of workers (0, 2, 2 persistent) changes between attempts; the run folder and TMPDIR are on the same or on
different filesystems. After each kill every checkpoint under a final name must verify (torn), and the newest published
one must still exist (lost). At the end every update of every attempt and the final weights are compared with an
uninterrupted run.

A signal is SIGTERM, SIGINT or SIGUSR1 at a random instant: the run must exit with 85 and resume to the same bits. A
damage is a flipped bit, a truncation, a zeroed range or a deletion in the newest checkpoint: it must be detected before
use, and the previous checkpoint used instead.

Attempts are forked from a process that has torch loaded, so a thousand runs take minutes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import forge
import forge_plugins
from benchmarks import machine
from benchmarks.stranger_optimizers import optimizer_of
from forge.checkpoint import Checkpoints, StoredCheckpoint
from forge.data import Loader
from forge.testing.trace import Recorder, compare, read_trace

UPDATES = 18
WORKERS = ("0 workers", "2 workers", "2 persistent")
DEATHS = ("micro-batch", "write", "instant")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PLACES = (tempfile.gettempdir(), "/dev/shm")
SEEDS = 6
"""Number of uninterrupted runs per precision, to compare the killed ones with."""
PRECISIONS = ("float32", "bf16", "fp16")
"""Used by cases in turn."""


# ---------------------------------------------------------------------------------------------------------------------
# Task and data


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Points with noise from all three random generators."""

    def __init__(self, length: int = 62):
        generator = torch.Generator().manual_seed(1)
        self.points = torch.randn(length, 8, generator=generator)
        self.labels = torch.randint(3, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(8) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
        return self.points[index] + noise, self.labels[index]


class Victim(forge.TaskModule):
    """A network with dropout, batch normalisation, generators of its own and an optimizer of one of several kinds, that
    can be killed in its step."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.rng, self.nested = np.random.default_rng(seed), [{"torch": torch.Generator().manual_seed(seed)}]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Any:
        count_down("micro-batch")
        x, y = batch
        if self.training:
            x = x + 0.1 * self.rng.normal() + 0.1 * torch.randn(8, generator=self.nested[0]["torch"])
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.seed, self.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Kills


class Countdown:
    """Calls left until a kill; on a class, as a global of the task's module is part of the trace."""

    calls: ClassVar[dict[str, int]] = {}


"""Calls left until the kill, by kind; set in a forked attempt only."""


def count_down(kind: str) -> None:
    """Count down and kill this process at 0, but not data workers, which inherit the counters."""
    if kind in Countdown.calls and os.getpid() == Countdown.calls["owner"]:
        Countdown.calls[kind] -= 1
        if Countdown.calls[kind] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def count_system_calls() -> None:
    """Count down before and after every system call that writes a checkpoint."""
    for name in ("open", "write", "fsync", "rename", "replace", "mkdir", "close", "symlink", "unlink", "rmdir"):
        real = getattr(os, name)

        def call(*args: Any, _real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            count_down("write")
            result = _real(*args, **kwargs)
            count_down("write")
            return result

        setattr(os, name, call)


def record_publications(folder: Path) -> None:
    """Record every checkpoint once it has its name: it may disappear only after a newer one."""
    rename = os.rename

    def publish(source: Any, target: Any, **kwargs: Any) -> None:
        rename(source, target, **kwargs)
        if re.fullmatch(r"update-\d+", Path(target).name):
            with (folder / "published").open("a") as file:
                file.write(f"{Path(target).name}\n")

    os.rename = publish


@dataclass(frozen=True, slots=True)
class Attempt:
    """The settings of one attempt of a run, and how it is killed."""

    workers: str
    death: str | None = None
    after: float = 0.0
    "Calls until the kill (for an instant: seconds)."
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that the bits of a run depend on."""

    seed: int
    precision: str

    @property
    def plugins(self) -> list[forge.Plugin]:
        """The plugins for the precision."""
        if self.precision == "float32":
            return []
        return [forge_plugins.AMP(self.precision, init_scale=2.0**20, growth_interval=3)]


def drawn(number: int, dice: random.Random) -> Run:
    """Draw the run of a case."""
    return Run(dice.randrange(SEEDS), PRECISIONS[number % len(PRECISIONS)])


def train_attempt(attempt: Attempt, folder: Path, run: Run) -> None:
    """Train from the newest checkpoint, in a forked child."""
    if attempt.death == "write":
        count_system_calls()
    if attempt.death in ("micro-batch", "write"):
        Countdown.calls.update({attempt.death: int(attempt.after), "owner": os.getpid()})
    count = 0 if attempt.workers == "0 workers" else 2
    options: dict[str, Any] = {"persistent_workers": attempt.workers == "2 persistent"} if count else {}
    train = Loader(Samples(), 4, shuffle=True, num_workers=count, **options)
    trainer = forge.Trainer(
        max_updates=UPDATES,
        seed=run.seed,
        device="cpu",
        log_every=3,
        validate_every="5 updates",
        run_dir=folder / "run",
        resume="auto",
        plugins=[
            *run.plugins,
            forge_plugins.Accumulate(4),
            forge_plugins.Clip(0.5),
            forge_plugins.Schedule("cosine", warmup=3),
            forge_plugins.Guard(),
            forge_plugins.Checkpoint(every="2 updates", keep=2, best={"monitor": "val/loss", "mode": "min"}),
            Recorder(folder / "trace.jsonl"),
        ],
    )
    trainer.fit(Victim(run.seed), train, Loader(Samples(20), 8))


def spawn(attempt: Attempt, folder: Path, run: Run) -> int:
    """Run an attempt in a child process, kill it as planned, and return its exit code."""
    log = folder / "stderr.log"
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            for number in SIGNALS:  # a background process may inherit ignored signals
                signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
            with log.open("ab", buffering=0) as file:
                os.dup2(file.fileno(), 2)
            record_publications(folder)
            train_attempt(attempt, folder, run)
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        except KeyboardInterrupt:
            status = 130
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    if attempt.death == "instant" or attempt.signal is not None:
        time.sleep(max(0.0, attempt.after - (time.monotonic() - started)))
        os.kill(child, attempt.signal or signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---------------------------------------------------------------------------------------------------------------------
# Cases


@dataclass(slots=True)
class Outcome:
    """The result of a case; `wrong` describes an error."""

    case: str
    row: str
    wrong: str = ""
    kind: str = "exact"
    "Kind of error: torn, lost, different, crashed, missed; else exact."
    deaths: int = 0


@dataclass(slots=True)
class Straight:
    """Uninterrupted runs."""

    folder: Path
    done: dict[Run, Path] = field(default_factory=dict)

    def of(self, run: Run) -> Path:
        if run not in self.done:
            path = self.folder / f"straight-{run.precision}-{run.seed}"
            path.mkdir(parents=True)
            code = spawn(Attempt("0 workers"), path, run)
            if code != 0:
                raise RuntimeError(f"the straight run failed ({code}):\n{(path / 'stderr.log').read_text()}")
            self.done[run] = path
        return self.done[run]


def killed_run(number: int, straight: Straight) -> Outcome:
    """Kill a run 1 to 3 times, then let it finish."""
    dice = random.Random(f"run:{number}")
    run = drawn(number, dice)
    expected = straight.of(run)
    os.environ["TMPDIR"] = dice.choice(PLACES)
    outcome = Outcome(f"run:{number}", "")
    while not outcome.deaths and not outcome.wrong:  # repeat if the run ended before the kill
        attempts = [_killed_attempt(dice) for _ in range(dice.randint(1, 3))]
        outcome.row = attempts[0].workers if run.precision == "float32" else f"amp {run.precision}"
        folder = Path(tempfile.mkdtemp(prefix="forge-faults-", dir=dice.choice(PLACES)))
        try:
            _kill_and_finish(attempts, dice, folder, run, expected, outcome)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _kill_and_finish(
    attempts: Sequence[Attempt], dice: random.Random, folder: Path, run: Run, expected: Path, outcome: Outcome
) -> None:
    for attempt in attempts:
        code = spawn(attempt, folder, run)
        if code == 0:
            break
        if code != -signal.SIGKILL:
            _wrong(outcome, "crashed", f"exit code {code}\n{(folder / 'stderr.log').read_text()}")
            return
        outcome.deaths += 1
        _check_folder(folder, outcome)
        if outcome.wrong:
            return
    if outcome.deaths:
        _finish(Attempt(dice.choice(WORKERS)), folder, run, expected, outcome)


def signalled_run(number: int, straight: Straight) -> Outcome:
    """Send one or two signals at random instants; each must leave a run that can be resumed."""
    dice = random.Random(f"signal:{number}")
    run = drawn(number, dice)
    outcome = Outcome(f"signal:{number}", "signals")
    expected = straight.of(run)
    while not outcome.deaths and not outcome.wrong:  # repeat if all came before the handlers or after the end
        folder = Path(tempfile.mkdtemp(prefix="forge-faults-"))
        try:
            _signal_and_live_on(dice, folder, run, expected, outcome)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _signal_and_live_on(dice: random.Random, folder: Path, run: Run, expected: Path, outcome: Outcome) -> None:
    for _ in range(dice.randint(1, 2)):
        attempt = Attempt(dice.choice(WORKERS), signal=dice.choice(SIGNALS), after=dice.uniform(0.0, 0.6))
        before = len(read_trace(folder / "trace.jsonl"))
        code = spawn(attempt, folder, run)
        if code == 0:
            break
        assert attempt.signal is not None
        # before the fit installs its handlers a signal has its default effect, and nothing new is to be saved
        early = code in (128 + attempt.signal, -attempt.signal) and len(read_trace(folder / "trace.jsonl")) == before
        if code != forge.Interrupted.EXIT_CODE and not early:
            _wrong(outcome, "crashed", f"exit code {code}\n{(folder / 'stderr.log').read_text()}")
            return
        outcome.deaths += not early
        _check_folder(folder, outcome)
    if not outcome.wrong and outcome.deaths:
        _finish(Attempt(dice.choice(WORKERS)), folder, run, expected, outcome)


def damaged_file(number: int, straight: Straight) -> Outcome:
    """Damage the newest checkpoint of a finished run: it must be detected, and the previous one used."""
    dice = random.Random(f"damage:{number}")
    expected = straight.of(drawn(number, dice))
    folder = Path(tempfile.mkdtemp(prefix="forge-faults-"))
    try:
        shutil.copytree(expected / "run" / "checkpoints", folder / "checkpoints", symlinks=True)
        before, newest = Checkpoints(folder / "checkpoints").all()[-2:]
        victim = dice.choice(sorted(path for path in newest.iterdir()))
        how = dice.choice(("flip", "truncate", "zero", "delete"))
        outcome = Outcome(f"damage:{number}", f"{how}")
        damage(victim, how, dice)
        found = Checkpoints(folder / "checkpoints").newest_valid()
        if found is None or found.path.name != before.name:
            return _wrong(outcome, "missed", f"{how} of {victim.name}: took {found and found.path.name}")
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def damage(path: Path, how: str, dice: random.Random) -> None:
    """Damage a file so that its content certainly changes."""
    if how == "delete":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif how == "truncate":
        del data[dice.randrange(len(data)) :]
    else:
        filled = [i for i, byte in enumerate(data) if byte]
        start = dice.choice(filled)
        stop = min(start + dice.randint(1, 4096), len(data))
        data[start:stop] = bytes(stop - start)
    path.write_bytes(bytes(data))


def _killed_attempt(dice: random.Random) -> Attempt:
    death = dice.choice(DEATHS)
    after: dict[str, float] = {
        "micro-batch": dice.randint(1, UPDATES * 4),
        "write": dice.randint(1, 400),
        "instant": dice.uniform(0.0, 0.5),
    }
    return Attempt(dice.choice(WORKERS), death, after[death])


def _check_folder(folder: Path, outcome: Outcome) -> None:
    """Check that every checkpoint under a final name verifies, and that the newest published one still exists."""
    there = Checkpoints(folder / "run" / "checkpoints").all()
    for path in there:
        try:
            StoredCheckpoint(path).verify()
        except forge.CheckpointError as error:
            _wrong(outcome, "torn", str(error))
    noted = folder / "published"
    published = noted.read_text().split() if noted.exists() else []
    last = there[-1].name if there else ""
    if published and max(published) > last:
        _wrong(outcome, "lost", f"{max(published)} was published, but the newest is {last or 'none'}")


def _finish(attempt: Attempt, folder: Path, run: Run, expected: Path, outcome: Outcome) -> None:
    code = spawn(attempt, folder, run)
    if code != 0:
        _wrong(outcome, "crashed", f"the last attempt: {code}\n{(folder / 'stderr.log').read_text()}")
        return
    difference = compare(read_trace(expected / "trace.jsonl"), read_trace(folder / "trace.jsonl"))
    if difference is not None:
        _wrong(outcome, "different", str(difference))
        return
    ends = [(path / "run" / "weights.safetensors").read_bytes() for path in (expected, folder)]
    if ends[0] != ends[1]:
        _wrong(outcome, "different", "the final weights differ")


def _wrong(outcome: Outcome, kind: str, what: str) -> Outcome:
    outcome.kind, outcome.wrong = kind, outcome.wrong or what
    return outcome


# ---------------------------------------------------------------------------------------------------------------------
# Command line

CASES: dict[str, Callable[[int, Straight], Outcome]] = {
    "run": killed_run,
    "signal": signalled_run,
    "damage": damaged_file,
}


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
                    fields = {name: getattr(outcome, name) for name in ("case", "row", "wrong", "kind", "deaths")}
                    out.write(json.dumps(fields) + "\n")
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
    import selectors

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
        counts = {kind: kinds[kind] for kind in ("exact", "torn", "lost", "different", "crashed", "missed")}
        rows.append({"row": row, "cases": len(mine), "deaths": sum(o.deaths for o in mine), **counts})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100, help="killed runs (default: %(default)s)")
    parser.add_argument("--signals", type=int, default=20, help="signalled runs (default: %(default)s)")
    parser.add_argument("--damages", type=int, default=100, help="damaged checkpoints (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="CASE", help="just this case, as printed: run:17, signal:3")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.getLogger("forge").setLevel(logging.CRITICAL)  # skipped checkpoints are expected
    counts = {"run": args.runs, "signal": args.signals, "damage": args.damages}
    names = args.only or [f"{kind}:{args.first + i}" for kind, count in counts.items() for i in range(count)]
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
        print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
        for row in rows:
            print("| " + " | ".join(str(value) for value in row.values()) + " |")
    bad = [outcome.case for outcome in outcomes if outcome.wrong]
    if bad:
        print("again with: " + " ".join(f"--only {case}" for case in bad), file=sys.stderr)
    return 1 if bad or len(outcomes) != len(names) else 0


if __name__ == "__main__":
    sys.exit(main())
