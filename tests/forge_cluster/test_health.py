"""health: ranks that compute wrongly or slowly are named, before the first update."""

from __future__ import annotations

import itertools
import json
import math
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge.cli import main
from forge.errors import NegativeVerdict, PeerFailed, RecipeError
from forge.testing import TinyTask, tiny_batches
from forge_cluster.health import Health, examination
from forge_cluster.health.examination import MEASURES, Pulse, examine, judge
from forge_plugins import DDP
from tests.support.lasting_ranks import ranks


def pulse(rank: int, *wrong: str, **seconds: float) -> Pulse:
    return Pulse(rank, f"n{rank}", "cpu", wrong, {"multiply": 1.0, "copy": 1.0, "exchange": 1.0, **seconds})


def test_the_slow_one_is_named_by_the_median_and_the_wrong_one_by_itself() -> None:
    assert judge([pulse(0), pulse(1), pulse(2)], 1.5) == []
    found = judge([pulse(0), pulse(1, multiply=1.6), pulse(2, "copy"), pulse(3, exchange=1.4)], 1.5)
    assert [str(one) for one in found] == [
        "rank 2 on n2 (cpu) copies between host and device wrongly",
        "rank 1 on n1 (cpu) multiplies 1.6 times as slowly as the median rank",
    ]
    two = judge([pulse(0, copy=2.0), pulse(1)], 1.5)  # of two ranks the faster is the standard
    assert [one.pulse.rank for one in two] == [0]


def one_is_broken(broken: str | None) -> list[Pulse]:
    """On a rank: examine all, where rank 1's product, or what it gets from its neighbour, has a wrong number."""
    from forge.distributed.rank_env import DistributedEnv

    env, multiplies, sends = DistributedEnv("cpu"), torch.mm, torch.Tensor.copy_

    def wrong_product(*given: Any, out: torch.Tensor) -> torch.Tensor:
        multiplies(*given, out=out)
        out[0, 0] += 1e6
        return out

    def wrong_copy(self: torch.Tensor, other: torch.Tensor, *more: Any) -> torch.Tensor:
        sends(self, other, *more)
        self[-1] += 7
        return self

    if env.rank == 1 and broken is not None:
        if broken == "multiply":
            examination.torch.mm = wrong_product  # pyright: ignore[reportAttributeAccessIssue]
        else:
            torch.Tensor.copy_ = wrong_copy  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return examine(env, slower=math.inf)
    finally:
        torch.mm, torch.Tensor.copy_ = multiplies, sends  # pyright: ignore[reportAttributeAccessIssue]
        env.close(failed=False)


@pytest.mark.parametrize("broken", [None, "multiply", "copy"])
def test_two_ranks_examine_each_other(broken: str | None) -> None:
    one, other = ranks(2)(one_is_broken, broken)
    assert one == other  # all ranks know all
    assert [each.rank for each in one] == [0, 1]
    assert all(set(each.seconds) == set(MEASURES) for each in one)
    assert one[1].wrong[:1] == (() if broken is None else (broken,))
    assert one[0].wrong in ((), ("exchange",))  # what a broken neighbour sends is seen on both sides


def waits_once(slow: bool) -> list[Pulse]:
    """On a rank: examine all by a clock of its own, on which a product takes a second; one of rank 1 a hundred, always
    or in the first rounds only."""
    from forge.distributed.rank_env import DistributedEnv

    env, multiplies, clock, calls, now = DistributedEnv("cpu"), torch.mm, time.perf_counter, itertools.count(), [0.0]

    def timed(*given: Any, out: torch.Tensor) -> torch.Tensor:
        now[0] += 100 if env.rank == 1 and (slow or next(calls) < examination.ROUNDS) else 1
        return multiplies(*given, out=out)

    examination.torch.mm, examination.time.perf_counter = timed, lambda: now[0]  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return examine(env, slower=10)
    finally:
        torch.mm, time.perf_counter = multiplies, clock  # pyright: ignore[reportAttributeAccessIssue]
        env.close(failed=False)


def test_who_is_slow_stays_slow_and_who_was_busy_does_not() -> None:
    assert [one.pulse.rank for one in judge(ranks(2)(waits_once, True)[0], 10) if one.measure == "multiply"] == [1]
    assert [one for one in judge(ranks(2)(waits_once, False)[0], 10) if one.measure == "multiply"] == []


def fit_beside_a_broken_rank() -> str:
    """On a rank: a fit in which rank 1 multiplies wrongly; what it raises."""
    multiplies = torch.mm

    def wrong(*given: Any, out: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        multiplies(*given, out=out)
        return out.add_(1e6) if dist.get_rank() == 1 else out

    torch.mm = wrong  # pyright: ignore[reportAttributeAccessIssue]
    trainer = forge.Trainer(plugins=[DDP(), Health(slower=1e9)], max_updates=1, run_dir=False, device="cpu", seed=0)
    try:
        trainer.fit(TinyTask(), tiny_batches())
    except (NegativeVerdict, PeerFailed) as error:
        assert trainer.progress.update == 0
        return str(error)
    finally:
        torch.mm = multiplies
    return ""


def test_a_wrong_rank_stops_the_run_before_its_first_update() -> None:
    told = ranks(2)(fit_beside_a_broken_rank)
    assert all("rank 1 on" in said and "multiplies wrongly" in said for said in told)
    first = [said for said in told if "failed first" not in said]
    assert first[0].endswith(f"\nunfit host: {socket.gethostname()}")  # which the script of a job looks for


def test_one_process_is_not_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_cluster.health.examine", lambda env: pytest.fail("examined"))
    forge.Trainer(plugins=[Health()], max_updates=1, run_dir=False, seed=0).fit(TinyTask(), tiny_batches())
    with pytest.raises(RecipeError, match="above 1"):
        Health(slower=1)


def test_a_checked_job_has_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "slurm", "quickstart", "-p", "ddp", "--procs", "2", "--check", "--out", "-"]) == 0
    text = capsys.readouterr().out
    assert "health.slow=stop" in text
    assert "-p health" in text


@pytest.mark.slow
def test_the_command_prints_all_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--ranks", "--nproc", "2", "--device", "cpu", "--slower", "1000", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    assert found["found"] == []
