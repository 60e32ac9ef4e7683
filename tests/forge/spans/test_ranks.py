"""The rank that the others wait for is named; where none is slow, nothing is said."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import forge
from forge.spans.ranks import LASTING, OWN, SLOW, SlowRanks
from forge.testing import TinyTask, tiny_batches
from forge_plugins import DDP, FSDP, Spans
from tests.support import spans_kit
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some
from tests.support.ranks import heard
from tests.support.spans_kit import Clock, Sink

HOST = socket.gethostname()


class Sleeps(TinyTask):
    """Each rank spends its milliseconds in its forward."""

    def __init__(self, clock: Clock, ms: float):
        super().__init__()
        self.clock, self.ms = clock, ms

    def training_step(self, batch: Any) -> Any:
        self.clock.spend(self.ms)
        return super().training_step(batch)


class Slow(list[Any]):
    """A loader that spends some on each batch."""

    def __init__(self, batches: Sequence[Any], clock: Clock, ms: float):
        super().__init__(batches)
        self.clock, self.ms = clock, ms

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.clock.spend(self.ms)
            yield batch


def run(strategy: Any, forward: tuple[float, float], load: tuple[float, float] = (0.0, 0.0)) -> Any:
    """The logs of one rank and its warnings about slow ones; what each rank spends is in milliseconds."""
    with pytest.MonkeyPatch.context() as patched, heard(logging.WARNING) as texts:
        rank, clock, sink = int(os.environ["RANK"]), spans_kit.set_clock(patched), Sink()
        plugins = [strategy(), Spans(hooks=True), sink]
        trainer = forge.Trainer(
            max_epochs=1, seed=0, device="cpu", run_dir=False, log_every=3, plugins=plugins, allow_inexact=True
        )
        trainer.fit(Sleeps(clock, forward[rank]), Slow(tiny_batches([8] * 18), clock, load[rank]))
    return sink.logs, [text for text in texts if "holds up" in text]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", some([DDP, FSDP]))
def test_a_rank_that_sleeps_is_named_once(strategy: Any) -> None:
    (logs, told), (others, silent) = ranks(2)(run, strategy, (10.0, 60.0))
    (text,) = told
    assert silent == []
    assert f"rank 1 on {HOST} holds up the others for " in text
    assert "forward takes it 60 ms, the median rank 10 ms" in text
    last = logs[18]
    assert last["rates/slowest_rank"] == 1
    assert last["rates/straggler_share"] > SLOW
    assert last["rates/waited_ms_rank0"] > last["rates/waited_ms_rank1"] == 0
    assert others[18]["rates/straggler_share"] == last["rates/straggler_share"]


@pytest.mark.slow
def test_a_rank_with_a_slow_loader_is_named_with_its_cause() -> None:
    (_, told), _ = ranks(2)(run, DDP, (1.0, 1.0), (60.0, 0.0))
    (text,) = told
    assert f"rank 0 on {HOST}" in text
    assert "Look there at the disk or network storage" in text


def compared(*own: float, logs: int = LASTING) -> tuple[dict[str, float], list[str]]:
    """What rank 0 logs and says of updates of a second, in which each rank computes for so many seconds."""
    world = len(own)

    def all_max(mine: list[int]) -> list[int]:
        size = len(mine) // world
        return [round(1e9 * ([0.0, 0.0, each, 0.0, 1.0][i])) for each in own for i in range(size)]

    env: Any = SimpleNamespace(world=world, rank=0, is_main=True, all_max=all_max, gather=lambda _: ["host"] * world)
    slow, found = SlowRanks(env), dict[str, float]()
    with heard(logging.WARNING) as texts:
        for _ in range(logs):
            found = slow.compare({**dict.fromkeys(OWN, 0.0), "forward": own[0]}, 1.0)
    return found, texts


def test_only_a_rank_that_stays_slow_is_warned_of() -> None:
    assert len(compared(0.1, 0.1, 0.5, logs=3 * LASTING)[1]) == 1
    assert compared(0.1, 0.1, 0.5, logs=LASTING - 1)[1] == []
    assert compared(0.3, 0.3, 0.3 + SLOW / 2)[1] == []


def test_the_metrics_are_against_the_slowest_and_the_median() -> None:
    found, _ = compared(0.1, 0.2, 0.6)
    assert found["slowest_rank"] == 2
    assert found["straggler_share"] == pytest.approx(0.4)
    assert [found[f"waited_ms_rank{rank}"] for rank in range(3)] == pytest.approx([500, 400, 0])
