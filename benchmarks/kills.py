"""Kill ranks of a run, under every strategy, at random moments: it names the cause, resumes, and ends in the same bits.

    python -m benchmarks.kills                                       # 30 kills: every strategy, plain and staged
    python -m benchmarks.kills --kills 200 --seed 1 --jobs 6 --out kills.jsonl
    python -m benchmarks.kills --strategies ddp,pipe.tensor --kills 4
    python -m benchmarks.kills --only 17 --seed 1                    # repeat one case by its printed number

Ranks on gloo, each a node of its own, train a small transformer in float64, with accumulation, clipping, an average of
weights and a schedule, and save every second update: to shared storage (plain), or to the memory of two nodes with a
checkpoint on shared storage every third time (staged). One rank, or all of them, get kill -9 at a random micro-batch,
at a random system call, most of which write states, or at a random instant. With staged states, a rank that dies may
take all files of its node along. With a quarter of the kills a rank is slow: it is stopped for half of the time. A
third of the cases are killed again after they have resumed.

Every kill counts as

    torn     if a checkpoint under a final name does not verify after it,
    lost     if the run goes on from an older state than the newest that was complete, and how many updates older,
    unnamed  if no rank that is left says which rank is gone (if none is left: if the run is not shown as killed),
    inexact  if the weights at the end differ from those of a run that was not killed,
    hang     if the others have not ended two minutes later; crashed if the resumed run fails.

A rank that dies by itself, of a fault in native code, is counted apart, and its run is resumed as after a kill.

`--out` gets one JSON object per kill, appended as soon as it is known.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import forge
from benchmarks import machine
from benchmarks.command_line import some_of
from benchmarks.fault_kinds.rank_victim import COUNTED, KINDS, STRATEGIES, RankAttempt, RankDeath
from benchmarks.fault_kinds.victim import HANG
from forge.checkpoint import Checkpoints, StoredCheckpoint
from forge.distributed.heartbeat import STORE_GONE
from forge.runs.folder import RunFolder

AGAIN = 1 / 3
"""Share of the cases that are killed a second time."""
NODE_TOO = 1 / 2
"""Share of lost ranks that take their node along, with staged states."""
EVERYONE = THROTTLED = 1 / 4
"""Shares of kills of all ranks, and with a slow one among them."""
EXACT = 1e-11
OWN, MOST = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS), 3
"""Exit codes of a process that crashed by itself, and how often in a row a run may: it is resumed as after a kill."""


@dataclass(slots=True)
class Kill:
    """One kill, and what became of the run."""

    case: int
    strategy: str
    kind: str
    moment: str
    victim: str
    "A rank, or all of them."
    throttled: bool
    node_lost: bool = False
    newest: int = 0
    "The update of the newest state that was complete when all ranks had ended; 0 for none."
    resumed: int = -1
    cause: str = ""
    difference: float | None = None
    "Of the weights at the end, after the last kill of the case."
    died: int = 0
    "Attempts after it that a rank ended by a signal of its own: a crash in native code."
    last_words: str = ""
    "Where such a rank was."
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def lost(self) -> int:
        return max(0, self.newest - self.resumed) if self.resumed >= 0 else 0


@dataclass(frozen=True, slots=True)
class RankCase:
    """A run with its number of kills."""

    number: int
    seed: int
    strategy: str
    kind: str

    @property
    def dice(self) -> random.Random:
        return random.Random(f"{self.seed}:{self.number}")

    @property
    def kills(self) -> int:
        return 2 if self.dice.random() < AGAIN else 1


def cases(kills: int, seed: int, strategies: Sequence[str]) -> list[RankCase]:
    """Return cases with so many kills: strategies in turn, and kinds of checkpoints in turn."""
    found: list[RankCase] = []
    while sum(case.kills for case in found) < kills:
        number = len(found)
        kind = KINDS[number // len(strategies) % len(KINDS)]
        found.append(RankCase(number, seed, strategies[number % len(strategies)], kind))
    return found


# -- a case -----------------------------------------------------------------------------------------------------------


def run_case(case: RankCase, folder: Path) -> list[Kill]:
    """Kill a run as often as planned, let it finish, and compare its end."""
    dice = case.dice
    dice.random()
    straight = Straight.of(case, folder)
    found: list[Kill] = []
    while not found:  # again if the run ended before its first kill
        place = Path(tempfile.mkdtemp(prefix=f"case-{case.number}-", dir=folder))
        try:
            _kill_and_finish(case, dice, place, straight, found)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return found


def _kill_and_finish(case: RankCase, dice: random.Random, place: Path, straight: Straight, found: list[Kill]) -> None:
    attempt = RankAttempt(case.strategy, case.kind, place)
    for _ in range(case.kills):
        death = straight.draw(dice, STRATEGIES[case.strategy].world)
        began = time.monotonic()
        codes = attempt.run(death)
        _note_resumed(found, attempt)
        if -signal.SIGKILL not in codes:
            if any(codes) and not any(code in OWN for code in codes):
                _crashed(found, attempt, codes)
                return
            if found and not any(codes):  # it ended before the second kill
                _compare(found[-1], attempt, straight)
                return
            if not found:
                return
            attempt.number += 1
            break
        victim = "all" if death.everyone else str(death.rank)
        kill = Kill(case.number, case.strategy, case.kind, death.moment, victim, death.throttled is not None)
        found.append(kill)
        kill.newest = _newest(place)
        kill.cause = _cause(death, attempt, place)
        kill.wrong += ["hang"] * (HANG in codes) + _torn(place)
        kill.wrong += [] if kill.cause else [f"unnamed: {codes}\n{attempt.said()[-4000:]}"]
        if case.kind == "staged" and not death.everyone and dice.random() < NODE_TOO:
            kill.node_lost = True
            shutil.rmtree(place / f"{socket.gethostname()}-{death.rank}", ignore_errors=True)
        kill.seconds = round(time.monotonic() - began, 1)
        attempt.number += 1
    codes = attempt.run()
    _note_resumed(found, attempt)
    while any(code in OWN for code in codes) and found[-1].died < MOST:
        found[-1].died += 1
        found[-1].last_words = attempt.said().partition("Fatal Python error")[2][:2000]
        attempt.number += 1
        codes = attempt.run()
    if any(codes):
        _crashed(found, attempt, codes)
        return
    found[-1].wrong += _torn(place)
    _compare(found[-1], attempt, straight)


def _note_resumed(found: list[Kill], attempt: RankAttempt) -> None:
    """Note the update that an attempt went on from, of the kill before it."""
    file = attempt.folder / "resumed"
    if found and file.exists():
        found[-1].resumed = int(file.read_text())
        if found[-1].lost:
            found[-1].wrong.append("lost")


def _crashed(found: list[Kill], attempt: RankAttempt, codes: list[int]) -> None:
    if not found:
        raise RuntimeError(f"A run that was not killed ended with {codes}:\n{attempt.said()}")
    found[-1].wrong.append(f"{'hang' if HANG in codes else 'crashed'}: {codes}\n{attempt.said()[-4000:]}")


def _newest(place: Path) -> int:
    """Return the newest state that had its final name."""
    noted = place / "states"
    names = noted.read_text().split() if noted.exists() else []
    return max((int(name.removeprefix("update-")) for name in names), default=0)


def _torn(place: Path) -> list[str]:
    wrong = []
    for path in Checkpoints(place / "run" / "checkpoints").all():
        try:
            StoredCheckpoint(path).verify()
        except forge.CheckpointError as error:
            wrong.append(f"torn: {error}")
    return wrong


def _cause(death: RankDeath, attempt: RankAttempt, place: Path) -> str:
    """Return what names the cause: a line of a rank that is left, or else how `forge runs` shows the run."""
    if death.everyone:
        status = RunFolder(place / "run").status
        return status if status == "killed" else ""
    lines = attempt.said().splitlines()
    gone = [line for line in lines if f"rank {death.rank} of" in line and "gone (killed?)" in line]
    if not gone and death.rank == 0:  # it kept the store
        gone = [line for line in lines if STORE_GONE in line]
    return gone[0] if gone else ""


def _compare(kill: Kill, attempt: RankAttempt, straight: Straight) -> None:
    ends = [torch.load(file) for file in attempt.folder.glob("end-*")]
    kill.difference = max(
        float((end[name] - value).abs().max()) for end in ends for name, value in straight.weights.items()
    )
    if len(ends) != STRATEGIES[attempt.strategy].world or kill.difference > EXACT:
        kill.wrong.append("inexact")


@dataclass(frozen=True, slots=True)
class Straight:
    """A run that is not killed: its weights, how long it takes, and how many calls each rank makes."""

    weights: dict[str, Any]
    seconds: float
    calls: list[dict[str, int]]

    @classmethod
    def of(cls, case: RankCase, folder: Path) -> Straight:
        """Return the run of this strategy; the first process that needs it makes it."""
        name = f"straight-{case.strategy}-{case.kind}"
        with _locked(folder / f"{name}.lock"):
            attempt = RankAttempt(case.strategy, case.kind, folder / name)
            if not (attempt.folder / "seconds").exists():
                codes = list(OWN)
                while any(code in OWN for code in codes):
                    shutil.rmtree(attempt.place, ignore_errors=True)
                    codes = attempt.run()
                if any(codes):
                    raise RuntimeError(f"A run that was not killed ended with {codes}:\n{attempt.said()[:4000]}")
                took = time.time() - (attempt.folder / "begun").stat().st_mtime
                (attempt.folder / "seconds").write_text(f"{took}")
        world = range(STRATEGIES[case.strategy].world)
        ends = [torch.load(attempt.folder / f"end-{rank}") for rank in world]
        calls = [json.loads((attempt.folder / f"calls-{rank}").read_text()) for rank in world]
        return cls(ends[0], float((attempt.folder / "seconds").read_text()), calls)

    def draw(self, dice: random.Random, world: int) -> RankDeath:
        moment, rank = dice.choice((*COUNTED, "instant")), dice.randrange(world)
        most = self.seconds if moment == "instant" else self.calls[rank][moment]
        after = dice.uniform(0, most) if moment == "instant" else dice.randint(1, max(1, int(most)))
        slow = dice.randrange(world) if dice.random() < THROTTLED else None
        return RankDeath(moment, rank, dice.random() < EVERYONE, after, slow)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


# -- all of them ------------------------------------------------------------------------------------------------------


def run_all(wanted: Sequence[RankCase], jobs: int, out: Path) -> None:
    """Run the cases in so many processes; each appends its kills to `out`."""
    with tempfile.TemporaryDirectory(prefix="forge-kills-", dir=_memory()) as folder:
        workers = []
        for job in range(min(jobs, len(wanted))):
            worker = os.fork()
            if worker == 0:
                _work(wanted[job::jobs], Path(folder), out)
            workers.append(worker)
        for worker in workers:
            os.waitpid(worker, 0)


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _work(wanted: Sequence[RankCase], folder: Path, out: Path) -> None:
    status = 1
    try:
        for case in wanted:
            try:
                kills = run_case(case, folder)
            except RuntimeError as error:
                print(f"case {case.number} ({case.strategy}, {case.kind}): {error}", file=sys.stderr, flush=True)
                continue
            with out.open("a") as lines:
                lines.writelines(json.dumps({**asdict(kill), "lost": kill.lost}) + "\n" for kill in kills)
            for kill in kills:
                said = ", ".join(wrong.partition("\n")[0] for wrong in kill.wrong) or f"resumed from {kill.resumed}"
                print(
                    f"{kill.case}: {kill.strategy} {kill.kind}, {kill.victim} at {kill.moment}: {said}", file=sys.stderr
                )
        status = 0
    finally:
        os._exit(status)


def table(kills: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per strategy and kind of checkpoint, then all of them."""
    keys = sorted(
        {(kill["strategy"], kill["kind"]) for kill in kills}, key=lambda key: (list(STRATEGIES).index(key[0]), key[1])
    )
    rows = [_row(*key, [kill for kill in kills if (kill["strategy"], kill["kind"]) == key]) for key in keys]
    return [*rows, _row("all", "", kills)]


def _row(strategy: str, kind: str, kills: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def count(word: str) -> int:
        return sum(any(wrong.startswith(word) for wrong in kill["wrong"]) for kill in kills)

    apart = [kill["difference"] for kill in kills if kill["difference"] is not None]
    return {
        "strategy": strategy,
        "checkpoints": kind,
        "kills": len(kills),
        "slow ranks": sum(kill["throttled"] for kill in kills),
        "nodes lost": sum(kill["node_lost"] for kill in kills),
        "resumed from the newest": sum(kill["resumed"] >= kill["newest"] for kill in kills),
        "updates lost beyond": sum(kill["lost"] for kill in kills),
        "torn": count("torn"),
        "cause named": len(kills) - count("unnamed"),
        "hang or crashed": count("hang") + count("crashed"),
        "died by themselves": sum(kill["died"] for kill in kills),
        "largest difference": f"{max(apart):.0e}" if apart else "",
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=2 * len(STRATEGIES), help="at least (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategies", type=some_of(STRATEGIES), default=list(STRATEGIES), help=", ".join(STRATEGIES))
    parser.add_argument("--only", type=int, action="append", metavar="CASE", help="just this case, as printed")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 3), help="cases at a time")
    parser.add_argument("--out", type=Path, default=Path("kills.jsonl"), help="gets a line per kill (kills.jsonl)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.getLogger("forge").setLevel(logging.ERROR)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # a store that is gone is expected
    wanted = cases(args.kills, args.seed, args.strategies)
    wanted = [case for case in wanted if not args.only or case.number in args.only]
    before = args.out.stat().st_size if args.out.exists() else 0
    began = time.monotonic()
    run_all(wanted, args.jobs, args.out)
    with args.out.open() if args.out.exists() else open(os.devnull) as lines:
        lines.seek(before)
        kills = [json.loads(line) for line in lines]
    print(f"{machine.sentence()} {time.monotonic() - began:.0f} s, {args.jobs} cases at a time.")
    rows = table(kills)
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    planned = {case.number for case in wanted}
    bad = sorted({kill["case"] for kill in kills if kill["wrong"]} | (planned - {kill["case"] for kill in kills}))
    if bad:
        print("again with: " + " ".join(f"--only {case}" for case in bad), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
