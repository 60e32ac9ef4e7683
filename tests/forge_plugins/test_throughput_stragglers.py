"""throughput: the rank that the others wait for is named; where none is slow, nothing is said."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import pytest

import forge
from forge.env import Env
from forge.testing import TinyTask, tiny_batches
from forge.util.clock import Totals
from forge_cluster.context_parallel import ContextParallel
from forge_cluster.pipeline import Pipeline
from forge_cluster.zero import Zero
from forge_plugins import DDP, FSDP, Accumulate, Throughput
from forge_plugins.tensor_parallel import TensorParallel
from forge_plugins.throughput import RATES, stragglers
from forge_plugins.throughput.stragglers import LASTING, SLOW, Pace, Stragglers
from tests.support import mesh_kit, throughput_kit
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some
from tests.support.ranks import heard
from tests.support.throughput_kit import Clock, Sink

clock = throughput_kit.clock
HOST = socket.gethostname()
NAMES = {"throughput/slowest_rank", "throughput/straggler_share", "throughput/waited_ms_rank0"}

# -- two real ranks, over gloo ----------------------------------------------------------------------------------------


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


def run(strategy: str, forward: tuple[float, float], load: tuple[float, float] = (0.0, 0.0)) -> Any:
    """The logs of one rank and its warnings about stragglers; what each rank spends is in milliseconds."""
    with pytest.MonkeyPatch.context() as patched:
        rank = int(os.environ["RANK"])
        return run_by(throughput_kit.set_clock(patched), strategy, forward[rank], load[rank])


def run_by(clock: Clock, strategy: str, forward: float, load: float) -> Any:
    sink = Sink()
    kind: Any = {"ddp": DDP, "fsdp": FSDP, "zero": Zero, "accumulate": DDP}[strategy]
    plugins = [kind(), Throughput(), sink, *([Accumulate(2)] if strategy == "accumulate" else [])]
    with heard(logging.WARNING) as texts:
        trainer = forge.Trainer(
            max_epochs=1, seed=0, device="cpu", run_dir=False, log_every=3, plugins=plugins, allow_inexact=True
        )
        batches = tiny_batches([8] * (36 if strategy == "accumulate" else 18))
        trainer.fit(Sleeps(clock, forward), Slow(batches, clock, load))
    return sink.logs, [text for text in texts if "holds up" in text]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", some(["ddp", "zero", "accumulate"]))
def test_a_rank_that_sleeps_is_named_once(strategy: str) -> None:
    (logs, told), (others, silent) = ranks(2)(run, strategy, (10.0, 60.0))
    (text,) = told
    assert silent == []
    assert f"rank 1 on {HOST} holds up the others for " in text
    assert "It computes more slowly" in text
    last = logs[18]
    assert last["throughput/slowest_rank"] == 1
    assert last["throughput/straggler_share"] > SLOW
    assert last["throughput/waited_ms_rank0"] > last["throughput/waited_ms_rank1"] == 0
    assert logs[3].keys() >= NAMES
    assert {name: others[18][name] for name in NAMES} == {name: last[name] for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", some(["fsdp", "ddp"]))
def test_a_rank_with_a_slow_loader_is_named_with_its_cause(strategy: str) -> None:
    (logs, told), _ = ranks(2)(run, strategy, (1.0, 1.0), (60.0, 0.0))
    (text,) = told
    assert f"rank 0 on {HOST}" in text
    assert "It waits for data: look at its disk" in text
    assert logs[18]["throughput/slowest_rank"] == 0


STRATEGIES: dict[str, Any] = {
    "fsdp": lambda: [FSDP()],
    "zero": lambda: [Zero(stage=2)],
    "tensor_parallel": lambda: [FSDP(), TensorParallel(2, plan=mesh_kit.PLAN)],
    "pipeline": lambda: [Pipeline(microbatches=2)],
    "context_parallel": lambda: [DDP(), ContextParallel()],
}


def with_a_slow_device(strategy: str) -> list[str]:
    """The warnings of a run in which rank 1 takes 20 ms longer for a product."""
    multiply = stragglers.DeviceProduct.multiply

    def slowly(self: Any) -> None:
        multiply(self)
        time.sleep(0.02 if os.environ["RANK"] == "1" else 0)  # limit: a slow device takes longer still; nothing waits

    with pytest.MonkeyPatch.context() as patched, heard(logging.WARNING) as texts:
        patched.setattr(stragglers.DeviceProduct, "multiply", slowly)
        patched.setattr(stragglers, "SHARE", 1.0)
        options: Any = {"device": "cpu", "run_dir": False, "log_every": 1, "allow_inexact": True}
        plugins = [*STRATEGIES[strategy](), Throughput()]
        trainer = forge.Trainer(max_updates=9, seed=0, plugins=plugins, **options)
        trainer.fit(mesh_kit.MeshWords(), mesh_kit.sentences(sizes=(8,) * 9))
    return [text for text in texts if "times as slow" in text]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", some(STRATEGIES))
def test_a_slow_device_is_named_where_ranks_meet_inside_of_a_step(strategy: str) -> None:
    (text,), silent = ranks(2)(with_a_slow_device, strategy)
    assert silent == []
    assert f"the device of rank 1 on {HOST} is " in text


class Behind(Throughput):
    """On rank 1 no step of the first interval is finished at its log, and FLOPs, items and memory stay unknown."""

    def _take(self) -> Totals:
        done = super()._take()
        if self._stragglers is None or self._stragglers._env.rank == 0:
            return done
        self._items.name = None
        return Totals.of([]) if self._updates == 3 else dataclasses.replace(done, counted=0.0)

    def _memory(self, trainer: forge.Run) -> dict[str, float]:
        memory = super()._memory(trainer)
        if trainer.env.rank == 1:
            del memory["activations_gb"]
        return memory


def one_behind() -> dict[int, dict[str, Any]]:
    sink = Sink()
    forge.Trainer(
        max_epochs=1, seed=0, device="cpu", run_dir=False, log_every=3, plugins=[DDP(), Behind(peak=1.0), sink]
    ).fit(Counts(), tiny_batches([8] * 6))
    return sink.logs


class Counts(TinyTask):
    def num_items(self, batch: Any) -> int:
        return len(batch[0])


def test_a_rank_without_a_value_leaves_it_to_the_others() -> None:
    logs, others = ranks(2)(one_behind)
    assert logs[3].keys() == others[3].keys()
    assert not logs[3].keys() & NAMES  # one rank has nothing to compare
    for names in (logs[3].keys(), logs[6].keys()):
        assert names >= {f"throughput/{name}" for name in (*RATES, "items_per_s", "activations_gb", "peak_gb")}
    assert logs[6].keys() >= NAMES
    one_update = logs[3]["throughput/samples_per_s"] * logs[3]["throughput/step_ms_max"] / 1e3
    assert one_update == pytest.approx(8)  # of rank 0 alone: a second rank with zeros would make it a quarter


# -- without ranks ----------------------------------------------------------------------------------------------------


class Many(Env):
    """One of several ranks, for which others' numbers are there already."""

    def __init__(self, *others: int, rank: int = 0):
        self.world, self.rank, self.asked = len(others) // 4, rank, 0
        self._others = others

    def all_max(self, numbers: Sequence[int]) -> list[int]:
        return [max(pair) for pair in zip(numbers, self._others, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        self.asked += 1
        return [f"host{rank}" for rank in range(self.world)]


def paced(*own: float) -> list[Pace]:
    return [Pace(0.0, seconds, 1.0) for seconds in own]


def judged(*logs: list[Pace], env: Env | None = None) -> tuple[int, list[dict[str, float]]]:
    """How often hosts were asked for, which a warning does, and the metrics."""
    env = env or Many(*[0] * 4 * len(logs[0]))
    found = Stragglers(env)
    metrics = [found.judge(paces) for paces in logs]
    return env.asked, metrics  # pyright: ignore[reportAttributeAccessIssue]


def test_only_a_rank_that_stays_slow_is_warned_of() -> None:
    slow, even, other = paced(0.2, 0.2, 0.5), paced(0.2, 0.2, 0.25), paced(0.5, 0.2, 0.2)
    assert judged(*[slow] * LASTING)[0] == 1
    assert judged(*[slow] * (5 * LASTING))[0] == 1
    assert judged(*[slow] * (LASTING - 1), even, *[slow] * (LASTING - 1))[0] == 0
    assert judged(*[slow, other] * LASTING)[0] == 0
    assert judged(*[even] * 5 * LASTING)[0] == 0


def test_the_metrics_are_against_the_slowest_and_the_median() -> None:
    (metrics,) = judged(paced(0.2, 0.3, 0.5))[1]
    assert metrics == pytest.approx(
        {
            "slowest_rank": 2,
            "straggler_share": 0.2,
            "waited_ms_rank0": 300,
            "waited_ms_rank1": 200,
            "waited_ms_rank2": 0,
        }
    )
    (metrics,) = judged(paced(*[0.1] * 99, 0.6))[1]
    assert metrics == pytest.approx({"slowest_rank": 99, "straggler_share": 0.5})
