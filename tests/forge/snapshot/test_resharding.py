"""A run goes on with another number of ranks and another strategy; with the same ones it goes on bit for bit."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import forge
from forge.checkpoint import Checkpoints
from forge.data import Loader
from forge.testing import TinyTask
from forge_cluster.context_parallel import ContextParallel
from forge_cluster.pipeline import Pipeline
from forge_cluster.zero import Zero
from forge_plugins import DDP, EMA, FSDP, Accumulate, Checkpoint, Clip, Schedule
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some

EXACT = 1e-11
"""The tolerance in float64 over the whole chain: sums over samples are taken in another order, and nothing else."""
CHAINS = {
    "short": [(2, "ddp"), (1, None), (2, "fsdp"), (2, "zero")],
    "long": [(2, "ddp"), (1, None), (4, "fsdp"), (2, "ddp"), (2, "fsdp"), (1, None)],
}
"""Ranks and strategy of one attempt after the other."""
STRATEGIES = ["fsdp", "ddp", "zero 2", "pipeline", "context", "zero", "interleaved"]


class Attending(nn.Linear):
    """Causal attention, with one layer for all it needs."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, input: Tensor) -> Tensor:
        h = super().forward(input)
        return input + nn.functional.scaled_dot_product_attention(h, input, h, is_causal=True)


class Wide(TinyTask):
    """A classifier of tokens: layers to shard, uneven ones too, and a temperature, which has no dimension; AdamW, whose
    state must come along. Nothing depends on the rank."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(0, dropout)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.tokens = nn.Embedding(6, 7)
            self.net = nn.Sequential(
                Attending(7), nn.LayerNorm(7), nn.ReLU(), nn.Dropout(dropout), nn.Linear(7, 5), nn.Linear(5, 3)
            )
        self.temperature = nn.Parameter(torch.ones(()))
        self.double()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.temperature * self.net(self.tokens(x)).transpose(1, 2)

    def training_step(self, batch: Any) -> Any:
        x, y, number = batch
        self.seen += number.tolist()
        return super().training_step((x, y))

    def validation_step(self, batch: Any) -> Any:
        return super().training_step(batch[:2])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data() -> Loader:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(most, (45, 8), generator=generator) for most in (6, 3))
    return Loader(TensorDataset(x, y, torch.arange(45)), 8, shuffle=True)


def go_on(
    folder: str, updates: int, strategy: str | None, dropout: float = 0.0, stop_at: int | None = None, every: int = 2
) -> dict[str, Any]:
    """Train up to `updates`, from where the folder's run is; `stop_at` leaves as an interrupted run does."""
    kinds: dict[str, Any] = {
        "ddp": lambda: [DDP()],
        "fsdp": lambda: [FSDP(min_size=0)],
        "zero": lambda: [Zero()],
        "zero 2": lambda: [Zero(stage=2)],
        "pipeline": lambda: [Pipeline(4)],
        "context": lambda: [DDP(), ContextParallel()],
        "interleaved": lambda: [Pipeline(4, schedule="interleaved_1f1b", stages=2)],
        "sharded stages": lambda: [Pipeline(4, stages=2, shard=True)],
    }
    plugins: list[Any] = [Accumulate(2), Clip(0.5), EMA(0.9, warmup=True), Schedule("constant")]
    plugins += [Checkpoint(every=f"{every} updates", keep=20), *(kinds[strategy]() if strategy else [])]
    if stop_at is not None:
        plugins.append(forge.on("boundary")(stop_after(stop_at)))
    task = Wide(dropout)
    trainer = forge.Trainer(
        max_updates=updates, seed=5, device="cpu", run_dir=folder, resume="auto", log_every=3, plugins=plugins
    )
    result = trainer.fit(task, data(), data())
    return {"seen": task.seen, "metrics": result.metrics, "updates": result.updates, "sharded": sharded(task)}


def stop_after(update: int) -> Any:
    def leave(trainer: forge.Trainer, step: forge.Step) -> None:
        if trainer.progress.update == update:
            trainer.request_stop("cut off", everywhere=True)

    return leave


def sharded(task: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in task.parameters())


def alone(*arguments: Any) -> list[dict[str, Any]]:
    """One process, whatever the environment of this one says."""
    for name in ("RANK", "WORLD_SIZE"):
        assert name not in os.environ
    return [go_on(*arguments)]


def saved(folder: Path, update: int) -> dict[str, Any]:
    return forge.checkpoint.StoredCheckpoint(Checkpoints(folder / "checkpoints").path(update)).load()


def flat(tree: Any, path: str = "") -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return {name: value for key, item in items for name, value in flat(item, f"{path}.{key}").items()}


def compare(ours: dict[str, Any], theirs: dict[str, Any], where: str = "") -> None:
    for part in ("model", "optimizers", "plugins"):
        mine, yours = flat(ours[part]), flat(theirs[part])
        assert mine.keys() == yours.keys(), where
        for name, value in yours.items():
            torch.testing.assert_close(
                mine[name], value, rtol=EXACT, atol=EXACT, msg=lambda m, n=name: f"{where} {n}: {m}"
            )


@pytest.mark.parametrize("kind", ["short", pytest.param("long", marks=pytest.mark.slow)])
def test_a_run_goes_on_over_any_ranks_and_either_strategy(kind: str, tmp_path: Path) -> None:
    chain = CHAINS[kind]
    straight = alone(str(tmp_path / "straight"), 3 * len(chain), None)[0]
    seen: list[int] = []
    for link, (count, strategy) in enumerate(chain):
        arguments = (str(tmp_path / "chain"), 3 * (link + 1), strategy)
        outcomes = alone(*arguments) if count == 1 else ranks(count)(go_on, *arguments)
        assert {outcome["updates"] for outcome in outcomes} == {3 * (link + 1)}
        seen += sorted(number for outcome in outcomes for number in outcome["seen"])
    assert sorted(seen) == sorted(straight["seen"])
    last = 3 * len(chain)
    ours, theirs = (saved(tmp_path / name, last) for name in ("chain", "straight"))
    assert ours["progress"] == theirs["progress"]
    assert ours["data"] == theirs["data"]
    compare(ours, theirs)


EVERY = list(itertools.permutations([None, *STRATEGIES], 2))
SHARDED = "sharded stages"
INTO_AND_OUT_OF = [pair for other in (None, *STRATEGIES) for pair in ((SHARDED, other), (other, SHARDED))]


@pytest.mark.parametrize(
    ("count", "pairs"),
    some(
        [
            (2, [("zero", "pipeline"), ("context", None)]),
            (2, EVERY),
            (4, [*EVERY, *INTO_AND_OUT_OF]),
        ]
    ),
    ids=["few of 2 ranks", "all of 2 ranks", "all of 4 ranks"],
)
def test_a_run_changes_from_one_strategy_to_another(count: int, pairs: Any, tmp_path: Path) -> None:
    alone(str(tmp_path / "straight"), 4, None)
    theirs = saved(tmp_path / "straight", 4)
    for number, pair in enumerate(pairs):
        folder = tmp_path / str(number)
        for updates, strategy in zip((2, 4), pair, strict=True):
            alone(str(folder), updates, None) if strategy is None else ranks(count)(
                go_on, str(folder), updates, strategy
            )
        compare(saved(folder, 4), theirs, f"{pair[0]} to {pair[1]}")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", some(STRATEGIES))
def test_the_same_ranks_go_on_bit_for_bit_with_their_rng(strategy: str, tmp_path: Path) -> None:
    ranks(2)(go_on, str(tmp_path / "straight"), 7, strategy, 0.3)
    ranks(2)(go_on, str(tmp_path / "cut"), 7, strategy, 0.3, 4)
    ranks(2)(go_on, str(tmp_path / "cut"), 7, strategy, 0.3)
    ours, theirs = (saved(tmp_path / name, 7) for name in ("cut", "straight"))
    assert flat(ours).keys() == flat(theirs).keys()
    assert [name for name, value in flat(theirs).items() if not torch.equal(flat(ours)[name], value)] == []
    assert ours["metrics"] == theirs["metrics"]
    first, second = (rng["torch"] for rng in ours["rng"])
    assert not torch.equal(first, second)
