"""Runs that are killed, and runs that get signals."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import forge
from benchmarks.fault_kinds.outcomes import PLACES, Outcome, Straight, check_folder, failed, finish, new_folder
from benchmarks.fault_kinds.victim import SIGNALS, UPDATES, WORKERS, Attempt, Run, drawn, spawn
from forge.snapshot.evidence import read_traces

DEATHS = ("micro-batch", "write", "instant")


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
        folder = new_folder(dice)
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
            failed(outcome, code, folder)
            return
        outcome.deaths += 1
        check_folder(folder, outcome)
        if outcome.wrong:
            return
    if outcome.deaths:
        finish(Attempt(dice.choice(WORKERS)), folder, run, expected, outcome)


def signalled_run(number: int, straight: Straight) -> Outcome:
    """Send one or two signals at random instants; each must leave a run that can be resumed."""
    dice = random.Random(f"signal:{number}")
    run = drawn(number, dice)
    outcome = Outcome(f"signal:{number}", "signals")
    expected = straight.of(run)
    while not outcome.deaths and not outcome.wrong:  # repeat if all came before the handlers or after the end
        folder = new_folder(dice)
        try:
            _signal_and_live_on(dice, folder, run, expected, outcome)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _signal_and_live_on(dice: random.Random, folder: Path, run: Run, expected: Path, outcome: Outcome) -> None:
    for _ in range(dice.randint(1, 2)):
        attempt = Attempt(dice.choice(WORKERS), signal=dice.choice(SIGNALS), after=dice.uniform(0.0, 0.6))
        before = sum(len(record.updates) for record in read_traces(folder))
        code = spawn(attempt, folder, run)
        if code == 0:
            break
        assert attempt.signal is not None
        # before the fit installs its handlers a signal has its default effect, and nothing new is to be saved
        made = sum(len(record.updates) for record in read_traces(folder))
        early = code in (128 + attempt.signal, -attempt.signal) and made == before
        if code != forge.Interrupted.EXIT_CODE and not early:
            failed(outcome, code, folder)
            return
        outcome.deaths += not early
        check_folder(folder, outcome)
    if not outcome.wrong and outcome.deaths:
        finish(Attempt(dice.choice(WORKERS)), folder, run, expected, outcome)


def _killed_attempt(dice: random.Random) -> Attempt:
    death = dice.choice(DEATHS)
    after: dict[str, float] = {
        "micro-batch": dice.randint(1, UPDATES * 4),
        "write": dice.randint(1, 400),
        "instant": dice.uniform(0.0, 0.5),
    }
    return Attempt(dice.choice(WORKERS), death, after[death])
