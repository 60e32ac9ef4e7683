"""Kill a training run anywhere, resume it, and see whether it ends in the same bits.

    python -m benchmarks.faults                      # 100 runs, 20 signals, 100 damaged files
    python -m benchmarks.faults --runs 1000 --signals 200 --damages 1000      # the full table: `make faults N=1000`
    python -m benchmarks.faults --only run:417       # one failure again, by the seed that was printed
    python -m benchmarks.faults --json

Every run trains a small network with shuffle, dropout, batch normalisation, per-sample augmentation, accumulation 4,
clip, schedule and guard, and saves every second update. The first of every three is in float32, the second in bf16, the
third in fp16, with a loss scale that keeps overflowing and growing. A run dies 1 to 3 times, each time in one of three
ways: kill -9 at a random micro-batch, at a random system call of a checkpoint's writing, or at a random instant. The
number of workers (0, 2, 2 persistent) changes between lives; the run folder and TMPDIR lie on the same or on different
filesystems. After each death every checkpoint under a final name must verify (torn), and the newest one there was must
still be there (lost). At the end every update of every life and the final weights are compared with a straight run.

A signal is SIGTERM, SIGINT or SIGUSR1 at a random instant: the run must exit with 85 and go on to the same bits. A
damage is a flipped bit, a truncation, a zeroed range or a deletion in the newest checkpoint: it must be found before
use, and the checkpoint before it taken instead.

Lives are forked from a process that has torch loaded, so a thousand runs take minutes.
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
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import forge
import forge_plugins
from benchmarks import machine
from forge.checkpoint import Checkpoints, StoredCheckpoint
from forge.data import Loader
from forge.testing.trace import Recorder, compare, read_trace

UPDATES = 18
WORKERS = ("0 workers", "2 workers", "2 persistent")
DEATHS = ("micro-batch", "write", "instant")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PLACES = (tempfile.gettempdir(), "/dev/shm")
SEEDS = 6
"""Straight runs of each precision that the killed ones are compared with."""
PRECISIONS = ("float32", "bf16", "fp16")
"""Cases take turns in them."""


# ---------------------------------------------------------------------------------------------------------------------
# What is trained


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Points with noise out of all three generators."""

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
    """Dropout, batch normalisation, and a place where it can be shot."""

    def __init__(self, seed: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Any:
        shoot("micro-batch")
        x, y = batch
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


# ---------------------------------------------------------------------------------------------------------------------
# How it dies

_gun: dict[str, int] = {}
"""Shots left before the deadly one, by kind; armed in a forked life only."""


def shoot(kind: str) -> None:
    """One more chance to die of this kind; data workers, which inherit the gun, are not meant."""
    if kind in _gun and os.getpid() == _gun["owner"]:
        _gun[kind] -= 1
        if _gun[kind] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def arm_system_calls() -> None:
    """Count every system call that writing a checkpoint makes, before and after it is done."""
    for name in ("open", "write", "fsync", "rename", "replace", "mkdir", "close", "symlink", "unlink", "rmdir"):
        real = getattr(os, name)

        def call(*args: Any, _real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            shoot("write")
            result = _real(*args, **kwargs)
            shoot("write")
            return result

        setattr(os, name, call)


def note_publications(folder: Path) -> None:
    """Write down every checkpoint as soon as it has its name: none of those may be gone without a newer one."""
    rename = os.rename

    def publish(source: Any, target: Any, **kwargs: Any) -> None:
        rename(source, target, **kwargs)
        if re.fullmatch(r"update-\d+", Path(target).name):
            with (folder / "published").open("a") as file:
                file.write(f"{Path(target).name}\n")

    os.rename = publish


@dataclass(frozen=True, slots=True)
class Life:
    """How one life of a run is led, and how it ends."""

    workers: str
    death: str | None = None
    after: float = 0.0
    "How many chances (or, for an instant, seconds) it takes."
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Which run is killed: what its bits depend on."""

    seed: int
    precision: str

    @property
    def plugins(self) -> list[forge.Plugin]:
        """What makes the precision."""
        if self.precision == "float32":
            return []
        return [forge_plugins.AMP(self.precision, init_scale=2.0**20, growth_interval=3)]


def drawn(number: int, dice: random.Random) -> Run:
    """The run of a case."""
    return Run(dice.randrange(SEEDS), PRECISIONS[number % len(PRECISIONS)])


def lead(life: Life, folder: Path, run: Run) -> None:
    """Train from the newest checkpoint on; runs in a forked child."""
    if life.death == "write":
        arm_system_calls()
    if life.death in ("micro-batch", "write"):
        _gun.update({life.death: int(life.after), "owner": os.getpid()})
    count = 0 if life.workers == "0 workers" else 2
    options: dict[str, Any] = {"persistent_workers": life.workers == "2 persistent"} if count else {}
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


def spawn(life: Life, folder: Path, run: Run) -> int:
    """Lead a life in a child process, end it as it is meant to end, and return its wait status."""
    log = folder / "stderr.log"
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            for number in SIGNALS:  # a process in the background may have been told to ignore them
                signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
            with log.open("ab", buffering=0) as file:
                os.dup2(file.fileno(), 2)
            note_publications(folder)
            lead(life, folder, run)
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        except KeyboardInterrupt:
            status = 130
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    if life.death == "instant" or life.signal is not None:
        time.sleep(max(0.0, life.after - (time.monotonic() - started)))
        os.kill(child, life.signal or signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---------------------------------------------------------------------------------------------------------------------
# Cases


@dataclass(slots=True)
class Outcome:
    """What a case came to: nothing wrong, or what."""

    case: str
    row: str
    wrong: str = ""
    kind: str = "exact"
    "What is wrong, in a word: torn, lost, different, crashed, missed."
    deaths: int = 0


@dataclass(slots=True)
class Straight:
    """Runs that nobody disturbed."""

    folder: Path
    done: dict[Run, Path] = field(default_factory=dict)

    def of(self, run: Run) -> Path:
        if run not in self.done:
            path = self.folder / f"straight-{run.precision}-{run.seed}"
            path.mkdir(parents=True)
            code = spawn(Life("0 workers"), path, run)
            if code != 0:
                raise RuntimeError(f"the straight run failed ({code}):\n{(path / 'stderr.log').read_text()}")
            self.done[run] = path
        return self.done[run]


def killed_run(number: int, straight: Straight) -> Outcome:
    """Die 1 to 3 times, then live to the end."""
    dice = random.Random(f"run:{number}")
    run = drawn(number, dice)
    expected = straight.of(run)
    os.environ["TMPDIR"] = dice.choice(PLACES)
    outcome = Outcome(f"run:{number}", "")
    while not outcome.deaths and not outcome.wrong:  # a run that was through before the shot shows nothing
        lives = [_deadly(dice) for _ in range(dice.randint(1, 3))]
        outcome.row = lives[0].workers if run.precision == "float32" else f"amp {run.precision}"
        folder = Path(tempfile.mkdtemp(prefix="forge-faults-", dir=dice.choice(PLACES)))
        try:
            _die_and_live_on(lives, dice, folder, run, expected, outcome)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _die_and_live_on(
    lives: Sequence[Life], dice: random.Random, folder: Path, run: Run, expected: Path, outcome: Outcome
) -> None:
    for life in lives:
        code = spawn(life, folder, run)
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
        _live_on(Life(dice.choice(WORKERS)), folder, run, expected, outcome)


def signalled_run(number: int, straight: Straight) -> Outcome:
    """One or two signals at random instants, each of which must leave a run that can be resumed."""
    dice = random.Random(f"signal:{number}")
    run = drawn(number, dice)
    outcome = Outcome(f"signal:{number}", "signals")
    expected = straight.of(run)
    while not outcome.deaths and not outcome.wrong:  # one that came before the handlers, or after the end, shows little
        folder = Path(tempfile.mkdtemp(prefix="forge-faults-"))
        try:
            _signal_and_live_on(dice, folder, run, expected, outcome)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _signal_and_live_on(dice: random.Random, folder: Path, run: Run, expected: Path, outcome: Outcome) -> None:
    for _ in range(dice.randint(1, 2)):
        life = Life(dice.choice(WORKERS), signal=dice.choice(SIGNALS), after=dice.uniform(0.0, 0.6))
        before = len(read_trace(folder / "trace.jsonl"))
        code = spawn(life, folder, run)
        if code == 0:
            break
        assert life.signal is not None
        # before the fit has its handlers the signal acts as it always does: there is nothing new to save
        early = code in (128 + life.signal, -life.signal) and len(read_trace(folder / "trace.jsonl")) == before
        if code != forge.Interrupted.EXIT_CODE and not early:
            _wrong(outcome, "crashed", f"exit code {code}\n{(folder / 'stderr.log').read_text()}")
            return
        outcome.deaths += not early
        _check_folder(folder, outcome)
    if not outcome.wrong and outcome.deaths:
        _live_on(Life(dice.choice(WORKERS)), folder, run, expected, outcome)


def damaged_file(number: int, straight: Straight) -> Outcome:
    """Damage the newest checkpoint of a finished run: it must be found out, and the one before it taken."""
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
    """Change a file for certain."""
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


def _deadly(dice: random.Random) -> Life:
    death = dice.choice(DEATHS)
    after: dict[str, float] = {
        "micro-batch": dice.randint(1, UPDATES * 4),
        "write": dice.randint(1, 400),
        "instant": dice.uniform(0.0, 0.5),
    }
    return Life(dice.choice(WORKERS), death, after[death])


def _check_folder(folder: Path, outcome: Outcome) -> None:
    """Every checkpoint under a final name verifies, and the newest that ever had its name is still there."""
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
        _wrong(outcome, "lost", f"{max(published)} was published, now there is {last or 'nothing'}")


def _live_on(life: Life, folder: Path, run: Run, expected: Path, outcome: Outcome) -> None:
    code = spawn(life, folder, run)
    if code != 0:
        _wrong(outcome, "crashed", f"the last life: {code}\n{(folder / 'stderr.log').read_text()}")
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
# The command

CASES: dict[str, Callable[[int, Straight], Outcome]] = {
    "run": killed_run,
    "signal": signalled_run,
    "damage": damaged_file,
}


def run_cases(
    names: Sequence[str], folder: Path, tell: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Run cases such as "run:12" one after the other."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        lead(
            Life("0 workers"), Path(scratch), Run(0, "fp16")
        )  # whatever loads on first use is loaded before the first fork
    straight, outcomes = Straight(folder), []
    for name in names:
        kind, _, number = name.partition(":")
        outcomes.append(CASES[kind](int(number), straight))
        tell(outcomes[-1])
    return outcomes


def _in_parallel(names: Sequence[str], jobs: int, tell: Callable[[Outcome], None]) -> list[Outcome]:
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
            tell(outcomes[-1])
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
    logging.getLogger("forge").setLevel(logging.CRITICAL)  # what is passed over is meant to be
    counts = {"run": args.runs, "signal": args.signals, "damage": args.damages}
    names = args.only or [f"{kind}:{args.first + i}" for kind, count in counts.items() for i in range(count)]
    done = 0

    def tell(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if outcome.wrong:
            print(f"\n{outcome.case} {outcome.kind}: {outcome.wrong}", file=sys.stderr)
        elif sys.stderr.isatty():
            print(f"\r{done} of {len(names)}", end="", file=sys.stderr)

    outcomes = _in_parallel(names, min(args.jobs, len(names)), tell)
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
