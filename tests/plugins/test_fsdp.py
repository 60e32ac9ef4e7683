"""fsdp: ranks that hold a part of the model each train what one process trains, and the task comes back whole."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import forge
from forge.errors import NonFiniteError, PeerFailed, RecipeError, StackError, TaskError
from forge.optim import state as optimizer_state
from forge.testing import tiny_batches
from forge_plugins import AMP, EMA, SAM, SWA, Accumulate, Clip, Compile, Freeze, Guard, Remat, Schedule
from forge_plugins.fsdp import FSDP
from forge_plugins.fsdp.blocks import blocks_of
from tests.support.lasting_ranks import ranks
from tests.support.tasks import PlainGAN

SIZES = (8, 8, 5, 1)
"""Five samples on four ranks are uneven; one sample leaves all but one rank without any."""

EXACT = 1e-12
"""The tolerance in float64: sums over samples are taken in another order, and nothing else."""


class Block(nn.Module):
    """A residual block: its hidden size is divided by no number of ranks here."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 7), nn.Linear(7, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Deep(forge.TaskModule):
    """Three equal blocks between two layers of other kinds; in float64, without what depends on the rank."""

    def __init__(self, lr: float = 0.1, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.lr = lr
        self.stem = nn.Linear(6, 8, dtype=dtype)
        self.blocks = nn.ModuleList(Block(8).to(dtype) for _ in range(3))
        self.head = nn.Linear(8, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def predict_step(self, batch: Any) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr / 10)


class Tied(Deep):
    """Two blocks that share a layer, and a head that shares a weight with the stem."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].fc1 = self.blocks[0].fc1  # pyright: ignore[reportAttributeAccessIssue]
        self.out = nn.Linear(6, 8, dtype=torch.float64)
        self.out.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.out(x)[:, :3]


def deep(kind: type[Deep] = Deep, **options: Any) -> Deep:
    torch.manual_seed(3)
    return kind(**options)


def wide(seed: int = 0, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    return [(x.double(), y) for x, y in tiny_batches(sizes, seed)]


def train(task: forge.TaskModule, plugins: list[Any], data: Any = None, **options: Any) -> dict[str, Any]:
    """Fit; on several ranks with fsdp, unless the plugins have one. Weights, metrics and counters."""
    given = [plugin for plugin in plugins if isinstance(plugin, FSDP)]
    several = (given or [FSDP()]) if "RANK" in os.environ else []
    plugins = [plugin for plugin in plugins if plugin not in given]
    options = {"max_epochs": 2, "seed": 0, "device": "cpu", "run_dir": False, "log_every": 2, **options}
    trainer = forge.Trainer(plugins=[*plugins, *several], **options)
    result = trainer.fit(task, wide() if data is None else data, wide(1, SIZES[-2:]))
    weights = {name: value.detach().clone() for name, value in task.state_dict().items()}
    return {"weights": weights, "metrics": result.metrics, "updates": result.updates, "stop": result.stop_reason}


def close(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = EXACT) -> None:
    assert ours["updates"] == theirs["updates"]
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, value in theirs["weights"].items():
        assert type(ours["weights"][name]) is Tensor
        torch.testing.assert_close(ours["weights"][name], value, rtol=tolerance, atol=tolerance)
    trained, other = ({n: v for n, v in run["metrics"].items() if "compile" not in n} for run in (ours, theirs))
    assert trained == pytest.approx(other, rel=max(1e-6, tolerance))


# ---------------------------------------------------------------------------------------------------------------------
# Against one process


class Graded(Deep):
    """Keeps what was gathered for an evaluation, because a backward might come."""

    evaluation = "grad"


@forge.on("inspect_grads")
def peep(step: forge.Step) -> None:
    """Gathers weights that are old by the next forward."""
    with torch.no_grad():
        step.trainer.model(wide()[0], "val")


def stacks() -> dict[str, Any]:
    """What is compared: by name, how to make a task and its plugins."""
    return {
        "nothing": lambda: (deep(), []),
        "window 3": lambda: (deep(), [Accumulate(3)]),
        "levers": lambda: (deep(), [Accumulate(3), Clip(0.5), EMA(0.9), Remat(), Schedule("linear")]),
        "values": lambda: (deep(), [Clip(max_norm=None, max_value=0.01)]),
        "two optimizers": lambda: (PlainGAN().double(), [Accumulate(2), Clip(0.5)]),
        "two optimizers, two blocks": lambda: (PlainGAN().double(), [FSDP(["generator", "discriminator"]), EMA(0.5)]),
        "kept until backward": lambda: (deep(), [FSDP(reshard=False), Accumulate(3), EMA(0.9)]),
        "evaluated with gradients": lambda: (deep(Graded), [FSDP(reshard=False), EMA(0.5)]),
        "looked at before the step": lambda: (deep(), [FSDP(reshard=False), peep]),
        "on the host": lambda: (deep(), [FSDP(offload=True, blocks="Block"), Accumulate(2), Clip(0.5), EMA(0.9)]),
        "frozen blocks": lambda: (deep(), [Freeze(["blocks.0", "*.bias"], thaw="1 epoch"), Accumulate(2)]),
        "swa": lambda: (deep(), [SWA(start=0.5)]),
        "tied": lambda: (Tied(), [Clip(0.5)]),
        "sam": lambda: (deep(), [SAM(0.05), Accumulate(2), Clip(0.5)]),
        "guarded": lambda: (deep(), [Guard("skip")]),
        "values, guarded, swa and looked at": lambda: (
            deep(),
            [Clip(max_norm=None, max_value=0.01), Guard("skip"), SWA(start=0.5), FSDP(reshard=False), peep],
        ),
        "compiled": lambda: (deep(), [Compile(backend="eager", blocks="Block"), Remat(every=2)]),
    }


def run_stack(name: str) -> dict[str, Any]:
    torch.manual_seed(5)
    return train(*stacks()[name]())


QUICK = (
    "levers",
    "two optimizers, two blocks",
    "on the host",
    "tied",
    "values, guarded, swa and looked at",
)
"""Together they have most parts of the others, which the long profile compares one by one, and all on four ranks."""
SLOW = [*((2, name) for name in stacks() if name not in QUICK), *((4, name) for name in stacks())]


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
        close(rank, alone)
        assert all(torch.equal(value, rank["weights"][key]) for key, value in together[0]["weights"].items())


def hybrid() -> dict[str, Any]:
    task, meshes = deep(), set()

    @forge.on("step_end")
    def look(step: forge.Step) -> None:
        meshes.update(p.device_mesh.mesh_dim_names for p in step.parameters() if isinstance(p, DTensor))

    found = train(task, [FSDP(replicate=2), Accumulate(2), Clip(0.5), EMA(0.9), look])
    return {**found, "meshes": meshes}


@pytest.mark.slow  # four ranks
def test_a_hybrid_mesh_trains_what_one_process_trains() -> None:
    alone = train(deep(), [Accumulate(2), Clip(0.5), EMA(0.9)])
    for rank in ranks(4)(hybrid):
        assert rank.pop("meshes") == {("replicate", "data")}
        close(rank, alone)


# ---------------------------------------------------------------------------------------------------------------------
# Against FSDP2 written by hand


def levers(options: dict[str, Any]) -> dict[str, Any]:
    plugins = [*([] if options else [AMP("bf16")]), Remat(), Accumulate(3), Clip(0.5), Schedule("linear"), EMA(0.5)]
    task, data = deep(dtype=torch.float32), tiny_batches((8,) * 6)
    averaged: dict[str, Tensor] = {}

    @forge.on("step_end")
    def look(step: forge.Step) -> None:
        averaged.update({name: t.full_tensor() for name, t in plugins[-1]._average.tensors.items()})

    found = train(task, [*plugins, look, FSDP(**options)], data, validate_every=None, max_epochs=1)
    return {"weights": found["weights"], "averaged": averaged}


def levers_by_hand(options: dict[str, Any]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    task = deep(dtype=torch.float32)
    short = options.get("mixed_precision") and torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=short, reduce_dtype=torch.float32) if short else MixedPrecisionPolicy()
    for block in task.blocks:
        fully_shard(block, mp_policy=policy)
    model: Any = fully_shard(task, mp_policy=policy)
    optimizer = torch.optim.AdamW(task.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / 2)
    averages: list[Any] = []
    batches = [(x.chunk(world)[rank], y.chunk(world)[rank]) for x, y in tiny_batches((8,) * 6)]
    for first in (0, 3):
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            x, y = batches[first + number]
            with torch.autocast("cpu", torch.bfloat16, enabled=short is None):
                loss = F.cross_entropy(model(x), y)
            (loss.float() / 3).backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        now = list(whole(task).values())
        averages = [torch.lerp(a, n, 0.5) for a, n in zip(averages, now, strict=True)] if averages else now
    weights = whole(task)
    return {"weights": weights, "averaged": dict(zip(weights, averages, strict=True))}


def whole(task: nn.Module) -> dict[str, Tensor]:
    """The parameters of a sharded task, put together from all ranks."""
    return {n: p.full_tensor().detach() for n, p in task.named_parameters() if isinstance(p, DTensor)}


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}], ids=["amp", "mixed precision"])
def test_a_stack_is_fsdp2_written_by_hand_bit_for_bit(options: dict[str, Any]) -> None:
    ours, theirs = ranks(2)(levers, options), ranks(2)(levers_by_hand, options)
    for kind in ("weights", "averaged"):
        for name, value in theirs[0][kind].items():
            assert torch.equal(ours[0][kind][name], value), f"{kind}: {name}"
            assert torch.equal(ours[1][kind][name], value), f"{kind}: {name}"


def collectives(window: int) -> list[int]:
    """How many reduce-scatters each update takes."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    send, counts = getattr(dist, name), [0]

    def counted(*args: Any, **options: Any) -> Any:
        counts[-1] += 1
        return send(*args, **options)

    @forge.on("step_end")
    def next_one(step: forge.Step) -> None:
        counts.append(0)

    setattr(dist, name, counted)
    try:
        train(deep(), [Accumulate(window), next_one], wide(sizes=(8,) * 6), validate_every=None, max_epochs=1)
    finally:
        setattr(dist, name, send)
    return counts[:-1]


def test_an_update_takes_one_round_of_gradients() -> None:
    units = 4  # three blocks, and the rest
    assert ranks(2)(collectives, 1) == [[units] * 6] * 2
    assert ranks(2)(collectives, 3) == [[units] * 2] * 2


# ---------------------------------------------------------------------------------------------------------------------
# A task from the meta device


class Attended(Deep):
    """With a module that draws its weights after those of its child, and one that keeps a buffer."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.BatchNorm1d(8)


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


# ---------------------------------------------------------------------------------------------------------------------
# What is left of it


def twice() -> dict[str, Any]:
    task = deep()
    note = task.stem.weight
    note.kind = "first"  # pyright: ignore[reportAttributeAccessIssue]
    own = {name: id(parameter) for name, parameter in task.named_parameters()}
    seen: dict[str, Any] = {}

    @forge.on("start")
    def look(trainer: forge.Trainer) -> None:
        first = trainer.task.stem.weight  # pyright: ignore[reportAttributeAccessIssue]
        seen.update(sharded=isinstance(first, DTensor), kind=first.kind, own=note.numel())  # pyright: ignore[reportAttributeAccessIssue]

    hooks = [len(vars(module)[kind]) for module in task.modules() for kind in vars(module) if "hooks" in kind]
    keys = [set(vars(module)) | {"trainer"} for module in task.modules()]
    plugin, average = FSDP(), EMA(0.5)
    trainer = forge.Trainer(
        max_epochs=1, seed=0, device="cpu", run_dir=False, log_every=2, plugins=[average, plugin, look]
    )
    trainer.fit(task, wide())
    seen["classes"] = {type(module).__name__ for module in task.modules()}
    seen["same"] = own == {name: id(parameter) for name, parameter in task.named_parameters()}
    seen["plain"] = all(type(parameter) is nn.Parameter for parameter in task.parameters())
    seen["hooks"] = hooks == [len(vars(m)[kind]) for m in task.modules() for kind in vars(m) if "hooks" in kind]
    seen["keys"] = keys == [set(vars(module)) | {"trainer"} for module in task.modules()]
    seen["first"] = {name: value.clone() for name, value in task.state_dict().items()}
    seen["forward"] = task(wide()[0][0]).detach()
    seen["val"] = trainer.validate(task, wide(1))
    seen["predicted"] = torch.cat(trainer.predict(task, wide(1)))
    trainer.fit(task, wide())
    seen["second"] = {name: value.clone() for name, value in task.state_dict().items()}
    average.apply_to(task)
    seen["averaged"] = {name: value.clone() for name, value in task.state_dict().items()}
    return seen


def test_a_task_comes_back_as_it_was_and_can_be_used_again() -> None:
    task = deep()
    average = EMA(0.5)
    trainer = forge.Trainer(max_epochs=1, seed=0, device="cpu", run_dir=False, log_every=2, plugins=[average])
    trainer.fit(task, wide())
    together = ranks(2)(twice)
    for rank in together:
        assert rank["sharded"]
        assert rank["kind"] == "first"
        assert rank["own"] == 0  # a parameter that is divided is not held whole beside it
        assert rank["classes"] == {"Deep", "Linear", "ModuleList", "Block", "LayerNorm"}
        assert rank["same"]
        assert rank["plain"]
        assert rank["hooks"]
        assert rank["keys"]
        for name, value in task.state_dict().items():
            torch.testing.assert_close(rank["first"][name], value, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(rank["forward"], task(wide()[0][0]), rtol=EXACT, atol=EXACT)
        assert rank["val"] == pytest.approx(trainer.validate(task, wide(1)))
        predicted = torch.cat(trainer.predict(task, wide(1)))
        torch.testing.assert_close(rank["predicted"], predicted, rtol=EXACT, atol=EXACT)
    trainer.fit(task, wide())
    trained = {name: value.clone() for name, value in task.state_dict().items()}
    average.apply_to(task)
    for rank in together:
        for name, value in trained.items():
            torch.testing.assert_close(rank["second"][name], value, rtol=EXACT, atol=EXACT)
            torch.testing.assert_close(rank["averaged"][name], task.state_dict()[name], rtol=EXACT, atol=EXACT)


def without_gathering() -> list[tuple[bool, int]]:
    task = deep()
    train(task, [FSDP(gather=False)])
    return [(isinstance(p, DTensor), p.to_local().numel()) for p in task.parameters() if isinstance(p, DTensor)]


def after_an_error() -> tuple[str, bool]:
    task = deep()

    @forge.on("step_end")
    def fail(step: forge.Step) -> None:
        raise RuntimeError("on purpose")

    with pytest.raises((RuntimeError, PeerFailed), match="on purpose"):
        train(task, [fail])
    return type(task.blocks[0]).__name__, any(isinstance(p, DTensor) for p in task.parameters())


def test_without_gathering_each_rank_keeps_its_shards() -> None:
    first, second = ranks(2)(without_gathering)
    assert len(first) == len(list(deep().parameters()))
    assert [a + b for (_, a), (_, b) in zip(first, second, strict=True)] == [p.numel() for p in deep().parameters()]
    assert ranks(2)(after_an_error) == [("Block", True)] * 2


# ---------------------------------------------------------------------------------------------------------------------
# State


def optimizer_roundtrip() -> dict[str, bool]:
    found: dict[str, bool] = {}

    @forge.on("boundary")
    def look(trainer: forge.Trainer) -> None:
        if trainer.progress.update != 3:
            return
        state = optimizer_state.save(trainer.optimizers, trainer.task)
        kept = {
            name: {key: value.clone() for key, value in values.items()}
            for name, values in state[""]["optimizer"]["state"].items()
        }
        for values in trainer.optimizers[None].state.values():
            for value in values.values():
                (value.to_local() if isinstance(value, DTensor) else value).zero_()
        tree = {"": {**state[""], "optimizer": {**state[""]["optimizer"], "state": kept}}}
        optimizer_state.refuse_others(trainer.optimizers, tree, trainer.task, "here")
        optimizer_state.load(trainer.optimizers, tree, trainer.task)
        again = optimizer_state.save(trainer.optimizers, trainer.task)[""]["optimizer"]["state"]
        found["names"] = list(again) == [name for name, _ in trainer.task.named_parameters()]
        for name, values in again.items():
            moment = values["exp_avg"]
            found[name] = isinstance(moment, DTensor) and moment.shape == trainer.task.get_parameter(name).shape
            found[name] &= torch.equal(moment.to_local(), kept[name]["exp_avg"].to_local())
            found[name] &= bool(values["step"] == 3)

    found |= {"weights": False}
    options = {"max_epochs": 1, "validate_every": None}
    weights = train(deep(), [look], **options)["weights"]
    plain = train(deep(), [], **options)["weights"]
    found["weights"] = all(torch.equal(value, weights[name]) for name, value in plain.items())
    return found


def averages_roundtrip() -> dict[str, bool]:
    average, found = EMA(0.9), {}

    @forge.on("boundary")
    def look(trainer: forge.Trainer) -> None:
        state = average._average.state_dict()
        kept = {"weights": {n: t.clone() for n, t in state["weights"].items()}, "updates": state["updates"]}
        for tensor in average._average.tensors.values():
            tensor.to_local().zero_()  # pyright: ignore[reportAttributeAccessIssue]
        average._average.load_state_dict(kept)
        for name, tensor in average._average.state_dict()["weights"].items():
            found[name] = isinstance(tensor, DTensor)
            found[name] &= torch.equal(tensor.to_local(), kept["weights"][name].to_local())

    train(deep(), [average, look], max_updates=2, max_epochs=None, validate_every=None)
    return found


def test_optimizer_state_and_averages_go_out_and_in_as_shards() -> None:
    for rank in ranks(2)(optimizer_roundtrip) + ranks(2)(averages_roundtrip):
        assert len(rank) > 20
        assert all(rank.values()), rank


# ---------------------------------------------------------------------------------------------------------------------
# What one rank finds


class Poisoned(Deep):
    """A gradient that is infinite in one entry, which one rank holds, at the third update."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = 0

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        self.updates += 1
        metrics = super().training_step(batch)
        if self.updates == 3:
            self.head.weight.register_hook(_spoil)  # of what is gathered: its last row is rank 1's
        return metrics


def _spoil(gradient: Tensor) -> Tensor:
    spoilt = gradient.clone()
    spoilt[-1, -1] = math.inf
    return spoilt


class HalfSick(Deep):
    """A loss that is not finite on one rank alone, and finite gradients everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = 0

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        self.updates += 1
        metrics = super().training_step(batch)
        if self.updates == 3 and os.environ.get("RANK", "1") == "1":
            metrics["loss"] = metrics["loss"] + torch.tensor(math.inf, dtype=torch.float64)
        return metrics


def guarded(kind: type[Deep], policy: str) -> dict[str, Any]:
    torch.manual_seed(3)
    task, told = kind(), []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("forge").addHandler(handler)
    try:
        found = train(task, [Guard(policy)], wide(sizes=(8,) * 4), validate_every=None, max_epochs=1)
        return {**found, "told": [text for text in told if text.startswith("guard skips")]}
    except (NonFiniteError, PeerFailed) as error:  # the second on the rank that hears of it
        return {"error": str(error)}
    finally:
        logging.getLogger("forge").removeHandler(handler)


@pytest.mark.parametrize("kind", [Poisoned, HalfSick])
def test_what_is_not_finite_on_one_rank_is_skipped_on_all(kind: type[Deep]) -> None:
    alone, together = guarded(kind, "skip"), ranks(2)(guarded, kind, "skip")
    for rank in together:
        assert rank.pop("told") == alone["told"]
        close(rank, {key: value for key, value in alone.items() if key != "told"})
    for said in (guarded(kind, "stop"), *ranks(2)(guarded, kind, "stop")):
        what = "the gradient of head.weight" if kind is Poisoned else "the loss"
        assert what in said["error"]


# ---------------------------------------------------------------------------------------------------------------------
# Refused, and told


def test_a_loss_scaler_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(StackError, match=r"(?s)grad_scaler.*Use amp\.dtype=bf16, which needs none\."):
        forge.Trainer(max_epochs=1, device="cpu", run_dir=False, plugins=[AMP("fp16"), FSDP()]).fit(deep(), wide())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"min_size": -1}, "fsdp.min_size is -1"),
        ({"replicate": 0}, "fsdp.replicate is 0"),
        ({"watchdog": 0}, "fsdp.watchdog is 0"),
        ({"blocks": []}, "fsdp.blocks is an empty list"),
        ({"mixed_precision": "fp16"}, "mixed_precision is 'fp16'"),
    ],
)
def test_a_wrong_option_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        FSDP(**values)


def test_blocks_are_found_or_named_and_small_ones_stay() -> None:
    task = deep()
    every = ["blocks.0", "blocks.1", "blocks.2"]
    assert list(blocks_of(task, [], 0)) == every
    assert list(blocks_of(task, ["Block"], 0)) == every
    assert list(blocks_of(task, ["blocks.[01]", "head"], 0)) == ["blocks.0", "blocks.1", "head"]
    assert list(blocks_of(task, ["blocks", "head"], 30)) == every
    assert blocks_of(task, [], 10_000) == {}
    assert list(blocks_of(Tied(), [], 0)) == ["blocks.1"]
    with pytest.raises(RecipeError, match=r"fsdp\.blocks: 'blocsk'"):
        blocks_of(task, ["blocsk"], 0)


def test_what_torch_cannot_divide_is_refused_by_name() -> None:
    scalar, slanted = deep(), deep()
    scalar.temperature = nn.Parameter(torch.ones(()))
    slanted.stem.weight = nn.Parameter(torch.ones(6, 8, dtype=torch.float64).T)
    for task, said in ((scalar, "temperature"), (slanted, "stem.weight")):
        with pytest.raises(TaskError, match=said):
            forge.Trainer(max_epochs=1, device="cpu", run_dir=False, plugins=[FSDP()]).fit(task, wide())


def test_one_process_alone_trains_with_it_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "forge"):
        task = deep()
        forge.Trainer(max_epochs=2, seed=0, device="cpu", run_dir=False, plugins=[FSDP(min_size=100), Clip(0.5)]).fit(
            task, wide()
        )
    alone = train(deep(), [Clip(0.5)])["weights"]
    for name, value in task.state_dict().items():
        torch.testing.assert_close(value, alone[name], rtol=EXACT, atol=EXACT)
    assert "fsdp: 512 parameters in 1 shards; sharded separately: blocks.0-2, and the rest" in caplog.text
    assert not any(isinstance(module, FSDPModule) for module in task.modules())
