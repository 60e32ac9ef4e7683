"""pipeline: ranks that hold some blocks each train what one process trains."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import forge
from forge.errors import RecipeError, StackError, TaskError
from forge_cluster.pipeline import Pipeline
from forge_cluster.pipeline.cutting import blocks_of, bounds_of
from forge_cluster.pipeline.last_metrics import LastMetrics
from forge_cluster.pipeline.scheduling import SCHEDULES
from forge_plugins import AMP, DDP, EMA, FSDP, SAM, Accumulate, Clip, Compile, CudaGraph, Freeze, Guard, Schedule
from tests.support.fitted import assert_rounded, fitted
from tests.support.fsdp_kit import Block, Deep, Tied, close, deep, wide
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some


class Deeper(Deep):
    """Eight blocks."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.blocks = nn.ModuleList(Block(8).double() for _ in range(8))


class Told(nn.Module):
    """A block with a condition and a dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor, condition: Tensor, *, scale: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.fc(x + condition))) * scale


class Conditioned(Deep):
    """Blocks that get what trained layers outside of them compute; the head gets it too."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.condition = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(Told(dropout) for _ in range(8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        condition = torch.tanh(self.condition(x))
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, condition, scale=self.scale)
        return self.head(x + condition)


class Skipping(Deeper):
    """The first block's output is added to the last one's."""

    def forward(self, x: Tensor) -> Tensor:
        x = early = self.blocks[0](self.stem(x))
        for block in list(self.blocks)[1:]:
            x = block(x)
        return self.head(x + early)


def kinds() -> dict[str, Any]:
    return {
        "levers": lambda: (
            deep(Deeper),
            [Accumulate(3), Clip(0.5), EMA(0.9), Schedule("linear"), Guard("skip")],
        ),
        "conditions": lambda: (deep(Conditioned), [Clip(0.5, norm_type=float("inf")), Accumulate(2)]),
        "frozen": lambda: (deep(Deeper), [Freeze(["blocks.[012]", "stem"], thaw="1 epoch"), Clip(0.5)]),
        "tied outside": lambda: (deep(TiedOutside), [Clip(max_norm=None, max_value=0.01)]),
    }


class TiedOutside(Deeper):
    """The stem's weight is used by the first and by the last stage."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.stem.weight.T)[:, :3]


def run(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    task, plugins = kinds()[kind]()
    return fit(task, [*plugins, *([Pipeline(**options)] if "RANK" in os.environ else [])])


def fit(task: forge.TaskModule, plugins: list[Any], **options: Any) -> dict[str, Any]:
    return fitted(task, plugins, wide(), wide(1), **options)


QUICK = [(2, "levers", {"schedule": "1f1b"})]
SLOW = [
    *((2, kind, {"schedule": order}) for kind in kinds() for order in SCHEDULES),
    *((4, kind, {"schedule": order, "microbatches": 8}) for kind in ("levers", "conditions") for order in SCHEDULES),
    *((4, kind, {"stages": 2}) for kind in kinds()),
    (8, "levers", {"schedule": "1f1b", "microbatches": 8}),
    (8, "levers", {"schedule": "gpipe", "stages": 4}),
    (2, "levers", {"split": ["blocks.3"]}),
    *((4, kind, {"schedule": order, "stages": 2, "shard": True}) for kind in kinds() for order in SCHEDULES),
    *((8, "levers", {"stages": stages, "microbatches": 8, "shard": True}) for stages in (2, 4)),
    (8, "conditions", {"schedule": "interleaved_1f1b", "stages": 2, "shard": True}),
]


@pytest.mark.parametrize(
    ("count", "kind", "options"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_stages_train_what_one_process_trains(count: int, kind: str, options: dict[str, Any]) -> None:
    alone, together = run(kind, {}), ranks(count)(run, kind, options)
    for rank in together:
        assert rank["held"]["parameters"] < alone["held"]["parameters"] / (1.9 if "shard" in options else 1)
        close(rank, alone, 1e-11)
        assert all(torch.equal(value, rank["weights"][key]) for key, value in together[0]["weights"].items())


class Single(Deeper):
    """In float32."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def in_bf16(amp: bool, options: dict[str, Any]) -> dict[str, Any]:
    plugins = [Pipeline(**options)] if "RANK" in os.environ else []
    return fit(deep(Single), [*plugins, *([AMP("bf16")] if amp else [])])["weights"]


SHARDED = {"stages": 2, "shard": True}
WITH_AND_WITHOUT_SHARDS = pytest.mark.parametrize(
    ("count", "options"), some([(2, {}), (4, SHARDED)]), ids=["2", "sharded"]
)


@pytest.mark.slow
@WITH_AND_WITHOUT_SHARDS
def test_amp_rounds_within_its_precision(count: int, options: dict[str, Any]) -> None:
    plain, alone = in_bf16(False, {}), in_bf16(True, {})
    assert_rounded(plain, alone, ranks(count)(in_bf16, True, options))


def drawn(seed: int | None = 0) -> list[float]:
    seen: list[float] = []

    class Draws(Conditioned):
        def training_step(self, batch: Any) -> Any:
            seen.append(torch.randn(()).item())
            return super().training_step(batch)

    task = deep(Draws, dropout=0.5)
    torch.manual_seed(os.getpid())
    fit(task, [Pipeline(2)], max_updates=2, max_epochs=None, validate_every=None, seed=seed)
    return seen


@pytest.mark.parametrize("seed", some([0, None], quick=1))
def test_draws_before_blocks_are_the_same_on_all_ranks(seed: int | None) -> None:
    first, second = ranks(2)(drawn, seed)
    assert len(first) == len(second) == 5  # two parts of two batches, and one that finds the shapes
    assert first == second
    assert len(set(first)) == 4


def drawn_in_blocks() -> list[float]:
    seen: list[float] = []
    task = deep(Conditioned, dropout=0.5)
    for block in task.blocks:
        assert isinstance(block, Told)
        block.drop.register_forward_pre_hook(lambda *_: seen.append(torch.rand(()).item()))
    fit(task, [Pipeline(2)], max_updates=2, max_epochs=None, validate_every=None)
    return seen


def test_draws_in_blocks_differ_by_stage_and_part() -> None:
    first, second = ranks(2)(drawn_in_blocks)
    assert len(set(first)) >= 16  # four blocks of two parts of two batches
    assert not {*first} & {*second}


def exported(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    task = deep(Deeper)
    plugins: Any = [Pipeline(2, **options), EMA(0.5)]
    trainer = forge.Trainer(max_epochs=1, seed=0, device="cpu", run_dir=folder, plugins=plugins)
    trainer.fit(task, wide())
    fresh = deep(Deeper)
    for average in (task, other := deep(Deeper)):
        plugins[1].apply_to(average)
    assert all(map(torch.equal, task.parameters(), other.parameters()))
    return {
        "average": task.state_dict(),
        "val": trainer.validate(fresh, wide(1)),
        "predicted": torch.cat(trainer.predict(fresh, wide(1))),
    }


def watched(folder: str, updates: int) -> int:
    plugins = {"tensorboard": {}, "checkpoint": {}, "pipeline": {"microbatches": 2}}
    options: dict[str, Any] = {"seed": 0, "device": "cpu", "run_dir": folder, "resume": "auto", "log_every": 1}
    return forge.Trainer(max_updates=updates, plugins=plugins, **options).fit(deep(Deeper), wide()).updates


@pytest.mark.slow
def test_a_logger_that_one_rank_has_is_saved_and_goes_on(tmp_path: Path) -> None:
    assert ranks(2)(watched, str(tmp_path), 2) == [2, 2]
    assert ranks(2)(watched, str(tmp_path), 4) == [4, 4]


@pytest.mark.slow
@WITH_AND_WITHOUT_SHARDS
def test_export_validate_and_predict_are_those_of_one_process(
    count: int, options: dict[str, Any], tmp_path: Path
) -> None:
    task = deep(Deeper)
    plugins = [EMA(0.5)]
    trainer = forge.Trainer(max_epochs=1, seed=0, device="cpu", run_dir=tmp_path / "one", plugins=plugins)
    trainer.fit(task, wide())
    fresh = deep(Deeper)
    together = ranks(count)(exported, str(tmp_path / "two"), options)
    for rank in together:
        torch.testing.assert_close(rank["average"], Deeper.from_checkpoint(tmp_path / "one").state_dict())
        assert rank["val"] == pytest.approx(trainer.validate(fresh, wide(1)))
        torch.testing.assert_close(rank["predicted"], torch.cat(trainer.predict(fresh, wide(1))))
    ours, theirs = (Deeper.from_checkpoint(tmp_path / name).state_dict() for name in ("two", "one"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-11, atol=1e-11)


def read_from_device() -> list[int]:
    """How often each update sends objects, which are read from the device first."""
    seen, send = [0], dist.broadcast_object_list

    def counted(*args: Any, **options: Any) -> Any:
        seen[-1] += 1
        return send(*args, **options)

    @forge.on("step_end")
    def next_one(step: forge.Step) -> None:
        seen.append(0)

    dist.broadcast_object_list = counted
    try:
        fit(deep(Deeper), [Pipeline(2), Accumulate(2), next_one], validate_every=None, max_epochs=3)
    finally:
        dist.broadcast_object_list = send
    return seen[:-1]


@pytest.mark.slow
def test_metrics_stay_on_the_device() -> None:
    for updates in ranks(2)(read_from_device):
        assert len(updates) == 6
        assert updates[0] > 0  # shapes and names
        assert updates[2:] == [0] * 4  # the first epoch had all shapes of batches


# ---------------------------------------------------------------------------------------------------------------------
# Refused


def broken(kind: type[Deep]) -> None:
    fit(deep(kind), [Pipeline()])


class Backwards(Deeper):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class Curved(Deeper):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("kind", "said"),
    some(
        [
            (Skipping, "as a skip connection does"),
            (Backwards, "out of order"),
            (Tied, "is shared by blocks of two stages"),
            (Curved, "LBFGS needs all parameters on one rank"),
        ],
        quick=2,
    ),
)
def test_a_task_that_cannot_be_cut_is_refused_by_name(kind: type[Deep], said: str) -> None:
    for error in ranks(2).errors(broken, kind):
        assert said in error


def test_metrics_that_change_are_refused_by_name() -> None:
    metrics, env = LastMetrics(), SimpleNamespace(pipe_rank=1, last=1)
    metrics._names, metrics.parts = ["loss", "accuracy"], [{"loss": 1.0, "other": 2.0}]
    said = "returned loss, accuracy first, and now loss, other. Return the same metrics in every step"
    with pytest.raises(TaskError, match=said):
        metrics.record(cast(Any, env), cast(Any, SimpleNamespace(micro=0)), [1.0])


def too_few() -> None:
    fit(deep(Deeper), [Pipeline(1)])


def test_too_few_parts_are_refused_by_name() -> None:
    for error in ranks(2).errors(too_few):
        assert "pipeline.microbatches is 1, which pipeline.schedule=1f1b does not take with 2 stages" in error


@pytest.mark.parametrize(
    "plugin", [DDP(), FSDP(), SAM(), AMP("fp16"), Compile(), CudaGraph()], ids=lambda plugin: plugin.name
)
def test_a_stack_that_makes_no_sense_is_refused(plugin: Any) -> None:
    with pytest.raises(StackError, match="pipeline"):
        fit(deep(Deeper), [Pipeline(), plugin])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"microbatches": 0}, "pipeline.microbatches is 0"),
        ({"stages": 1}, "pipeline.stages is 1"),
        ({"schedule": "gpip"}, "gpip"),
        ({"watchdog": 0}, "pipeline.watchdog is 0"),
    ],
)
def test_a_wrong_option_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        Pipeline(**values)


def test_blocks_are_cut_evenly_or_where_they_are_named() -> None:
    blocks = blocks_of(deep(Deeper), [])
    assert list(blocks) == [f"blocks.{i}" for i in range(8)]
    assert bounds_of(blocks, 4, []) == [0, 2, 4, 6, 8]
    assert bounds_of(blocks, 8, []) == list(range(9))
    assert bounds_of(blocks, 3, ["blocks.1", "blocks.7"]) == [0, 1, 7, 8]
    uneven = nn.Sequential(nn.Linear(90, 90), *(nn.Linear(2, 2) for _ in range(3)))
    bounds = bounds_of(dict(uneven.named_children()), 3, [])
    assert bounds[:2] == [0, 1]
    assert bounds == sorted(set(bounds))  # no stage is empty
    assert bounds[-1] == len(uneven)
    for split, said in ((["blocks.9"], "'blocks.9' is no module"), (["head", "blocks.1"], "several containers")):
        with pytest.raises(RecipeError, match=said):
            blocks_of(deep(Deeper), split)
    with pytest.raises(RecipeError, match="needs 1 blocks in their order"):
        bounds_of(blocks, 2, ["blocks.3", "blocks.4"])
    with pytest.raises(TaskError, match=r"8 blocks .* cannot make 9 stages"):
        bounds_of(blocks, 9, [])


def test_of_equal_containers_every_rank_cuts_the_first() -> None:
    """Whatever the order of a set, which differs between processes."""
    task = nn.Module()
    for name in "hgfedcba":
        task.add_module(name, nn.Sequential(Block(4), Block(4)))
    assert list(blocks_of(task, [])) == ["h.0", "h.1"]


def test_one_process_alone_trains_with_it_too() -> None:
    close(fit(deep(Deeper), [Pipeline(), Clip(0.5)]), fit(deep(Deeper), [Clip(0.5)]))
