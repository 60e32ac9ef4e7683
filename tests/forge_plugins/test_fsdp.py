"""fsdp: ranks that hold a part of the model each train what one process trains, and the task comes back whole."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import forge
from forge.errors import TaskError
from forge.optim.sharded import local
from forge.testing import tiny_batches
from forge_plugins import EMA, Accumulate, Clip
from forge_plugins.fsdp import FSDP
from tests.support.fsdp_kit import QUICK, SLOW, Deep, Gain, Tempered, close, deep, full, levers, stacks, train, wide
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some

# ---------------------------------------------------------------------------------------------------------------------
# Against one process


def run_stack(name: str) -> dict[str, Any]:
    torch.manual_seed(5)
    task, plugins = stacks()[name]()
    scalars: set[type] = set()

    @forge.on("inspect_grads")
    def look(step: forge.Step) -> None:
        scalars.update(type(p) for p in step.parameters() if not p.ndim)

    return {**train(task, [*plugins, look]), "scalars": scalars}


@pytest.mark.parametrize(
    ("count", "name"),
    [
        *((2, name) for name in QUICK),
        *(pytest.param(*i, marks=pytest.mark.slow) for i in SLOW),
    ],
)
def test_several_ranks_train_what_one_process_trains(count: int, name: str) -> None:
    alone, together = run_stack(name), ranks(count)(run_stack, name)
    for rank in together:
        assert rank["scalars"] <= {nn.Parameter}
        close(rank, alone)
        assert all(torch.equal(value, rank["weights"][key]) for key, value in together[0]["weights"].items())


# ---------------------------------------------------------------------------------------------------------------------
# Against FSDP2 written by hand


def levers_by_hand(options: dict[str, Any]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    task = deep(Tempered, dtype=torch.float32)
    scalars = [parameter for parameter in task.parameters() if not parameter.ndim]
    short = options.get("mixed_precision") and torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=short, reduce_dtype=torch.float32) if short else MixedPrecisionPolicy()
    for block in task.blocks:
        fully_shard(block, mp_policy=policy, ignored_params=set(scalars))
    model: Any = fully_shard(task, mp_policy=policy, ignored_params=set(scalars))
    optimizer = torch.optim.AdamW(task.parameters(), lr=0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / 2)
    averages: list[Any] = []
    trained = [name for name, parameter in task.named_parameters() if parameter.requires_grad]
    batches = [(x.chunk(world)[rank], y.chunk(world)[rank]) for x, y in tiny_batches((8,) * 6)]
    for first in (0, 3):
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            x, y = batches[first + number]
            with torch.autocast("cpu", torch.bfloat16, enabled=short is None):
                loss = F.cross_entropy(model(x), y)
            (loss.float() / 3).backward()
        for scalar in scalars:
            if scalar.grad is not None:
                dist.all_reduce(scalar.grad)
                scalar.grad /= world
        clip_by_hand([parameter for parameter in task.parameters() if parameter.ndim], scalars)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        now = [whole(task)[name] for name in trained]
        averages = [torch.lerp(a, n, 0.5) for a, n in zip(averages, now, strict=True)] if averages else now
    return {"weights": whole(task), "averaged": dict(zip(trained, averages, strict=True))}


def clip_by_hand(divided: list[nn.Parameter], scalars: list[nn.Parameter]) -> None:
    """By one norm of them all."""
    norms = [torch.nn.utils.get_total_norm([p.grad for p in each if p.grad is not None]) for each in (divided, scalars)]
    norm = torch.stack([full(norm) for norm in norms]).norm()
    torch.nn.utils.clip_grads_with_norm_(divided, 0.5, norm)
    torch.nn.utils.clip_grads_with_norm_(scalars, 0.5, norm)


def whole(task: nn.Module) -> dict[str, Tensor]:
    """The parameters of a sharded task, put together from all ranks."""
    return {name: full(parameter).clone() for name, parameter in task.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("options", some([{}, {"mixed_precision": "bf16"}]), ids=["amp", "mixed precision"])
def test_a_stack_is_fsdp2_written_by_hand_bit_for_bit(options: dict[str, Any]) -> None:
    ours, theirs = ranks(2)(levers, options), ranks(2)(levers_by_hand, options)
    for kind in ("weights", "averaged"):
        for name, value in theirs[0][kind].items():
            assert torch.equal(ours[0][kind][name], value), f"{kind}: {name}"
            assert torch.equal(ours[1][kind][name], value), f"{kind}: {name}"


def reductions(window: int, options: dict[str, Any]) -> list[int]:
    """How many reduce-scatters each update takes."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    send, counts = getattr(dist, name), [0]

    def counted(*args: Any, **given: Any) -> Any:
        counts[-1] += 1
        return send(*args, **given)

    @forge.on("step_end")
    def next_one(step: forge.Step) -> None:
        counts.append(0)

    setattr(dist, name, counted)
    try:
        plugins = [Accumulate(window), next_one, FSDP(**options)]
        train(deep(), plugins, wide(sizes=(8,) * 6), validate_every=None, max_epochs=1)
    finally:
        setattr(dist, name, send)
    return counts[:-1]


@pytest.mark.slow
def test_an_update_takes_one_round_of_gradients_or_one_for_each_micro_batch() -> None:
    units = 4  # three blocks, and the rest
    assert ranks(2)(reductions, 1, {}) == [[units] * 6] * 2
    assert ranks(2)(reductions, 3, {}) == [[units] * 2] * 2
    assert ranks(2)(reductions, 3, {"reduce": "micro"}) == [[3 * units] * 2] * 2


# ---------------------------------------------------------------------------------------------------------------------
# A task from the meta device


class Attended(Deep):
    """With a module that draws its weights after those of its child, one that keeps a buffer, and a scalar."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.more = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), Gain(torch.float32)) for _ in range(2))


def from_meta() -> dict[str, Any]:
    torch.manual_seed(7)
    with torch.device("meta"):
        task = Attended()
    torch.rand(os.getpid() % 7)  # what is drawn in between, and by whom, does not matter
    started: dict[str, Tensor] = {}

    @forge.on("start")
    def look(trainer: forge.Trainer) -> None:
        started.update(whole(trainer.task))
        started.update(dict(trainer.task.named_buffers()))

    forge.Trainer(max_updates=1, device="cpu", run_dir=False, plugins=[FSDP(), look]).fit(task, tiny_batches((8,)))
    trained = {name: parameter.detach() for name, parameter in task.named_parameters()}
    return {"started": started, "trained": trained}


@pytest.mark.slow
def test_weights_drawn_by_block_are_those_of_a_full_task() -> None:
    torch.manual_seed(7)
    full = Attended()
    for rank in ranks(2)(from_meta):
        assert rank["started"].keys() == full.state_dict().keys()
        for name, value in full.state_dict().items():
            assert torch.equal(rank["started"][name], value), name
        assert all(torch.isfinite(value).all() for value in rank["trained"].values())


class Scaled(nn.Module):
    """A parameter and nobody who says what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))


class Bare(Deep):
    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        self.scaled = Scaled()


class Initialised(Bare):
    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Scaled):
            nn.init.constant_(module.scale, 3.0)
        elif isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)


class Forgetful(Bare):
    def init_weights(self, module: nn.Module) -> None:
        pass


class AllAtOnce(Bare):
    def init_weights(self) -> None:
        pass


def fit_from_meta(kind: type[Deep]) -> dict[str, Tensor]:
    with torch.device("meta"):
        task = kind()
    trainer = forge.Trainer(max_updates=1, device="cpu", run_dir=False, plugins=[FSDP()], seed=0)
    trainer.fit(task, tiny_batches((8,)))
    return {name: parameter.detach() for name, parameter in task.named_parameters()}


@pytest.mark.slow
def test_a_task_says_what_is_in_weights_that_no_module_draws() -> None:
    first, second = ranks(2)(fit_from_meta, Initialised)
    assert torch.equal(first["scaled.scale"], torch.full((8,), 3.0))
    assert first["stem.weight"].abs().max() < 0.1
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Bare, "scaled of Bare has parameters or buffers, and no reset_parameters()"),
        (Forgetful, "scaled.scale of a task from the meta device has no initial values"),
        (AllAtOnce, "AllAtOnce.init_weights is called with each module in turn"),
    ],
)
def test_weights_that_nobody_draws_are_refused_by_name(kind: type[Deep], said: str) -> None:
    with pytest.raises(TaskError) as caught:
        fit_from_meta(kind)
    assert said in str(caught.value)


class SingleNorm(nn.LayerNorm):
    """In float32 inside a model in float64, as in models of bf16."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x.float()).double()


class InTwoTypes(Deep):
    """Blocks with such a norm, and perhaps a layer whose weight and bias differ."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = SingleNorm(8)
        if odd:
            self.head.bias = nn.Parameter(torch.zeros(3))


def in_two_types(odd: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    return train(InTwoTypes(odd), [Clip(0.5)])


def test_parameters_of_two_types_train_as_in_one_process() -> None:
    expected = in_two_types(False)
    assert {value.dtype for value in expected["weights"].values()} == {torch.float32, torch.float64}
    for rank in ranks(2)(in_two_types, False):
        close(rank, expected, 1e-6)


def test_a_layer_of_two_types_is_refused_by_name() -> None:
    for error in ranks(2).errors(in_two_types, True):
        assert "head (Linear) are float32 and float64: torch's FSDP shards those of one type together." in error


class Curved(Deep):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def curved() -> None:
    train(deep(Curved), [])


def test_an_optimizer_of_one_long_vector_is_refused() -> None:
    assert all("LBFGS joins all parameters into one vector" in error for error in ranks(2).errors(curved))


class GradientBytes(forge.Plugin):
    """Counts the bytes of gradients that torch's FSDP holds on this rank after each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []

    @forge.hookimpl(wrapper=True)
    def forge_micro_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        result = yield
        if "RANK" in os.environ and not step.is_last_micro:
            model: Any = step.trainer.model
            groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if hasattr(m, "_get_fsdp_state")]
            tensors: list[Any] = [group._partial_reduce_output for group in groups]
            for each in (each for group in groups for each in group.fsdp_params):
                tensors.append(each.unsharded_accumulated_grad)
                tensors.append(getattr(getattr(each, "_unsharded_param", None), "grad", None))
                tensors.append(each.sharded_param.grad)
            parts = [local(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
            self.held.append(sum({part.data_ptr(): part.nbytes for part in parts}.values()))  # names of one memory
        return result


def run(options: dict[str, Any]) -> dict[str, Any]:
    bytes_held = GradientBytes()
    plugins = [Accumulate(3), Clip(0.5), EMA(0.9), bytes_held, FSDP(**options)]
    found = train(deep(), plugins if "RANK" in os.environ else plugins[:-1])
    return {**found, "held": bytes_held.held}


WHOLE = sum(parameter.nbytes for parameter in deep().parameters())


def shard_bytes(count: int) -> int:
    """What the first of `count` ranks has: torch divides each parameter by rows."""
    return sum(-(-len(p) // count) * (p.nbytes // len(p)) for p in deep().parameters())


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    some(
        [
            (2, {"reduce": "micro"}, shard_bytes(2)),
            (4, {"reduce": "micro"}, shard_bytes(4)),
            (4, {"reduce": "micro", "reshard": False}, shard_bytes(4)),
            (4, {"reduce": "micro", "replicate": 2}, shard_bytes(2)),
            (2, {"reduce": "micro", "offload": True}, shard_bytes(2)),
            (2, {}, WHOLE),
            (4, {}, WHOLE),
        ]
    ),
)
def test_gradients_take_what_the_formula_says_and_train_the_same(count: int, options: Any, expected: int) -> None:
    alone, together = run({}), ranks(count)(run, options)
    for rank in together:
        close(rank, alone)
    held = [max(each) for each in zip(*(rank["held"] for rank in together), strict=True)]
    assert len(held) == 4  # two windows of three in a run: two micro-batches each wait for the last
    assert held == [expected] * 4
