"""fsdp: parameters without a dimension, as a learned temperature, which torch does not shard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import forge
from forge.testing import tiny_batches
from forge_cluster.pipeline import Pipeline
from forge_plugins import AMP, EMA, SAM, SWA, Accumulate, Clip, Freeze, Guard, Remat, Schedule, TensorParallel
from forge_plugins.fsdp import COUNTS_UNUSED, FSDP
from forge_plugins.fsdp.blocks import sharded_blocks
from tests.support.fsdp_kit import Block, Deep, close, deep, peep, train, wide
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some

EXACT = 1e-11


class Gain(nn.Module):
    """A parameter without a dimension, and no other; it is drawn, so that a rank could draw another."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty((), dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.gain, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Scaled(Block):
    """A block with one in it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = Gain()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale(super().forward(x))


class Tempered(Deep):
    """Has such parameters before all others, in blocks, frozen, and without a use."""

    options: dict[str, Any] = {}

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(dtype=dtype)
        self.blocks = nn.ModuleList(Scaled(8).to(dtype) for _ in range(3))
        self.temperature, self.offset = Gain(dtype), Gain(dtype).requires_grad_(False)
        self.unused = Gain(dtype)
        self._modules = dict(reversed(self._modules.items()))  # so that the optimizer begins with them

    def forward(self, x: Tensor) -> Tensor:
        return self.temperature(super().forward(x)) + self.offset.gain

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1, **self.options)


class Shared(Tempered):
    """One for all blocks, and for what comes after them."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.scale = self.temperature


class Fused(Tempered):
    options = {"fused": True}


class ForEach(Tempered):
    options = {"foreach": True}


class Turns(Tempered):
    """Two optimizers, one of them for parameters without a dimension alone."""

    def configure_optimizers(self) -> Any:
        single = [parameter for parameter in self.parameters() if not parameter.ndim]
        others = [parameter for parameter in self.parameters() if parameter.ndim]
        return {"scales": torch.optim.SGD(single, lr=0.1), "others": torch.optim.AdamW(others, lr=0.01)}

    def training_step(self, batch: Any, optimizer: str | None = None) -> dict[str, Tensor]:
        return super().training_step(batch)


STACKS: dict[str, Any] = {
    "levers": lambda: (deep(Tempered), [Accumulate(3), Clip(0.05), EMA(0.9), Remat(), Schedule("linear")]),
    "fused": lambda: (deep(Fused), [FSDP(["Scaled", "temperature"]), Clip(0.05), Accumulate(2)]),
    "foreach": lambda: (deep(ForEach), [FSDP(reshard=False), Clip(0.05, norm_type=float("inf")), peep]),
    "on the host": lambda: (deep(Tempered), [FSDP(offload=True), Accumulate(2), Clip(0.05), EMA(0.9)]),
    "sam, guarded, swa": lambda: (deep(Tempered), [SAM(0.05), Guard("skip"), SWA(start=0.5)]),
    "values": lambda: (deep(Tempered), [Clip(max_norm=None, max_value=1e-3)]),
    "frozen": lambda: (deep(Tempered), [Freeze(["*.scale"], thaw="1 epoch"), Accumulate(2)]),
    "two optimizers": lambda: (deep(Turns), [Clip(0.05), Accumulate(2)]),
    "shared": lambda: (deep(Shared), [Accumulate(2), Clip(0.05), EMA(0.9)]),
    "asking": lambda: (deep(Tempered), [FSDP(find_unused=COUNTS_UNUSED)]),
    "hybrid": lambda: (deep(Tempered), [FSDP(replicate=2), Accumulate(2), Clip(0.05), EMA(0.9)]),
}
QUICK = ("levers",)


def run_stack(name: str) -> dict[str, Any]:
    task, plugins = STACKS[name]()
    kinds: set[type] = set()

    @forge.on("inspect_grads")
    def look(step: forge.Step) -> None:
        kinds.update(type(p) for p in step.parameters() if not p.ndim)

    return {**train(task, [*plugins, look]), "kinds": kinds}


@pytest.mark.parametrize(
    ("count", "name"),
    [
        *((2, name) for name in QUICK),
        *(pytest.param(2, name, marks=pytest.mark.slow) for name in STACKS if name not in (*QUICK, "hybrid")),
        *(pytest.param(4, name, marks=pytest.mark.slow) for name in STACKS),
    ],
)
@pytest.mark.slow
def test_a_scalar_trains_as_in_one_process(count: int, name: str) -> None:
    alone, together = run_stack(name), ranks(count)(run_stack, name)
    for rank in together:
        assert rank["kinds"] == {nn.Parameter}
        close(rank, alone, EXACT)
        assert all(torch.equal(value, rank["weights"][key]) for key, value in together[0]["weights"].items())


def messages(window: int) -> list[int]:
    """How many sums over ranks have the gradients of all scalars, in each update."""
    send, counts = dist.all_reduce, [0]
    used = 4  # of three blocks, and the temperature

    def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        counts[-1] += tensor.numel() == used and tensor.dtype is torch.float64
        return send(tensor, *args, **options)

    @forge.on("step_end")
    def next_one(step: forge.Step) -> None:
        counts.append(0)

    dist.all_reduce = counted
    try:
        options: dict[str, Any] = {"validate_every": None, "max_epochs": 1, "log_every": 1000}
        train(deep(Tempered), [Accumulate(window), next_one], wide(sizes=(8,) * 6), **options)
    finally:
        dist.all_reduce = send
    return counts[:-1]


@pytest.mark.slow
def test_all_scalars_are_averaged_in_one_message_per_update() -> None:
    assert ranks(2)(messages, 1) == [[1] * 6] * 2
    assert ranks(2)(messages, 3) == [[1] * 2] * 2


# ---------------------------------------------------------------------------------------------------------------------
# Against FSDP2 written by hand


def shortened(options: dict[str, Any]) -> dict[str, Tensor]:
    plugins = [*([] if options else [AMP("bf16")]), Clip(0.5), Accumulate(2), FSDP(**options)]
    task, data = deep(Tempered, dtype=torch.float32), tiny_batches((8,) * 6)
    return train(task, plugins, data, validate_every=None, max_epochs=1)["weights"]


def shortened_by_hand(options: dict[str, Any]) -> dict[str, Tensor]:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    task = deep(Tempered, dtype=torch.float32)
    scalars = [parameter for parameter in task.parameters() if not parameter.ndim]
    short = torch.bfloat16 if options else None
    policy = MixedPrecisionPolicy(param_dtype=short, reduce_dtype=torch.float32) if short else MixedPrecisionPolicy()
    for block in task.blocks:
        fully_shard(block, mp_policy=policy, ignored_params=set(scalars))
    model: Any = fully_shard(task, mp_policy=policy, ignored_params=set(scalars))
    optimizer = torch.optim.AdamW(task.parameters(), lr=0.01, weight_decay=0.1)
    batches = [(x.chunk(world)[rank], y.chunk(world)[rank]) for x, y in tiny_batches((8,) * 6)]
    for first in (0, 2, 4):
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            x, y = batches[first + number]
            with torch.autocast("cpu", torch.bfloat16, enabled=short is None):
                logits = model(x)
                loss = F.cross_entropy(logits, y)
            (loss.float() / 2).backward()
        for scalar in scalars:
            if scalar.grad is not None:
                dist.all_reduce(scalar.grad)
                scalar.grad /= world
        divided = [parameter for parameter in task.parameters() if parameter.ndim]
        norms = [
            torch.nn.utils.get_total_norm([p.grad for p in each if p.grad is not None]) for each in (divided, scalars)
        ]
        norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
        torch.nn.utils.clip_grads_with_norm_(divided, 0.5, norm)
        torch.nn.utils.clip_grads_with_norm_(scalars, 0.5, norm)
        optimizer.step()
        optimizer.zero_grad()
    named = task.named_parameters()
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in named}


@pytest.mark.slow
@pytest.mark.parametrize("options", some([{}, {"mixed_precision": "bf16"}]), ids=["amp", "mixed precision"])
def test_in_bf16_it_is_fsdp2_written_by_hand(options: dict[str, Any]) -> None:
    ours, theirs = ranks(2)(shortened, options), ranks(2)(shortened_by_hand, options)
    for rank in ours:
        assert all(torch.equal(rank[name], value) for name, value in theirs[0].items())


# ---------------------------------------------------------------------------------------------------------------------
# The task, before and after


class Drawn(Deep):
    """Draws its weights in the order of its modules."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        self.more = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), Gain(torch.float32)) for _ in range(2))
        self.temperature = Gain(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for block in self.more:
            x = block(x)
        return self.temperature(x)


def from_meta() -> dict[str, Tensor]:
    torch.manual_seed(7)
    with torch.device("meta"):
        task = Drawn()
    started: dict[str, Tensor] = {}

    @forge.on("start")
    def look(trainer: forge.Trainer) -> None:
        for name, parameter in trainer.task.named_parameters():
            started[name] = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()

    forge.Trainer(max_updates=1, device="cpu", run_dir=False, plugins=[FSDP(), look]).fit(task, tiny_batches((8,)))
    assert all(type(parameter) is nn.Parameter for parameter in task.parameters())
    return started


@pytest.mark.slow
def test_a_scalar_from_the_meta_device_is_drawn() -> None:
    torch.manual_seed(7)
    full = Drawn()
    for rank in ranks(2)(from_meta):
        assert all(torch.equal(rank[name], value) for name, value in full.state_dict().items())


def test_a_scalar_that_blocks_share_leaves_them_units() -> None:
    assert list(sharded_blocks(deep(Shared), [], 0)) == ["blocks.0", "blocks.1", "blocks.2"]


def left_over(folder: str, options: dict[str, Any]) -> set[str]:
    """The parameters that a task has after a fit as before it."""
    task = deep(Tempered)
    own = {name: id(parameter) for name, parameter in task.named_parameters()}
    plugins = [FSDP(**options)] if "RANK" in os.environ else []
    trainer = forge.Trainer(max_epochs=1, seed=0, device="cpu", run_dir=folder, plugins=plugins)
    trainer.fit(task, wide())
    return {name for name, parameter in task.named_parameters() if id(parameter) == own[name]}


@pytest.mark.slow
@pytest.mark.parametrize("gather", some([False, True]))
def test_a_task_keeps_its_scalars_and_exports_them(gather: bool, tmp_path: Path) -> None:
    every = left_over(str(tmp_path / "alone"), {})
    singles = {name for name in every if name.endswith("gain")}
    kept = every if gather else singles
    assert ranks(2)(left_over, str(tmp_path / "together"), {"gather": gather}) == [kept] * 2
    ours, theirs = deep(Tempered), deep(Tempered)
    forge.load_weights(ours, tmp_path / "together" / "weights.safetensors")
    forge.load_weights(theirs, tmp_path / "alone" / "weights.safetensors")
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=EXACT, atol=EXACT)


# ---------------------------------------------------------------------------------------------------------------------
# Beside other plugins


class Chosen(Tempered):
    """A sample whose first feature is positive uses one more parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = Gain()

    def forward(self, x: Tensor) -> Tensor:
        rare = (x[:, 0] > 0).nonzero()[:, 0]
        logits = super().forward(x)
        return logits.index_put((rare,), self.rare(logits[rare])) if len(rare) else logits


def sorted_out(find_unused: bool) -> dict[str, Any]:
    """Some updates in which rank 0 alone has samples of that kind, some in which no rank has, or all have."""
    x, y = wide(sizes=(8,))[0]
    low, high = x.clone(), x.clone()
    low[:, 0], high[:, 0] = -1.0, 1.0
    mixed = torch.cat([high[:4], low[4:]])
    return train(deep(Chosen), [FSDP(find_unused=find_unused)], [(each, y) for each in (mixed, low, high, mixed)])


@pytest.mark.slow
@pytest.mark.skipif(not COUNTS_UNUSED, reason="needs torch 2.15")
def test_a_scalar_that_one_rank_uses_trains_if_asked_for() -> None:
    alone = sorted_out(False)
    for rank in ranks(2)(sorted_out, True):
        close(rank, alone, EXACT)


@pytest.mark.slow
def test_a_scalar_that_one_rank_uses_is_refused_by_name() -> None:
    for error in ranks(2).errors(sorted_out, False):
        assert "fsdp: rare.gain got a gradient on some ranks, or in some updates, only" in error


def beside(kind: str) -> dict[str, Any]:
    plugins = {
        "tensor": lambda: [FSDP(), TensorParallel(2, plan={"stem": "gather"})],
        "divided": lambda: [FSDP(), TensorParallel(2, plan={"stem": "gather", "temperature": "replicate"})],
        "sharded stages": lambda: [Pipeline(2, stages=2, shard=True)],
    }
    several = plugins[kind]() if "RANK" in os.environ else []
    options: dict[str, Any] = {"max_epochs": 2, "seed": 0, "device": "cpu", "run_dir": False, "log_every": 2}
    stack = [Accumulate(2), Clip(0.05), EMA(0.9), *several]
    task = deep(Tempered)
    result = forge.Trainer(plugins=stack, **options).fit(task, wide(sizes=(8,) * 4), wide(1))
    weights = {name: value.detach().clone() for name, value in task.state_dict().items()}
    return {"weights": weights, "metrics": result.metrics, "updates": result.updates}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "kind"),
    some([(2, "tensor"), (4, "tensor"), (4, "sharded stages")]),
)
def test_a_scalar_trains_beside_divided_layers(count: int, kind: str) -> None:
    alone = beside(kind)
    for rank in ranks(count)(beside, kind):
        close(rank, alone, EXACT)


def test_a_scalar_in_a_layer_of_the_plan_is_refused_by_name() -> None:
    for error in ranks(2).errors(beside, "divided"):
        assert "fsdp: temperature.gain of Tempered has no dimension, and is in a layer that is divided." in error
        assert "Leave that layer out of tensor_parallel.plan" in error
