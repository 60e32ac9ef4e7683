"""zero: ranks that keep the optimizer state of some parameters each train what one process trains."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import forge
from forge.distributed import rank_env
from forge.errors import RecipeError, StackError, TaskError
from forge_cluster.zero import Zero, owners_of
from forge_plugins import AMP, DDP, EMA, FSDP, SAM, Accumulate, Clip, Freeze, Guard, Schedule
from tests.support.fitted import fitted
from tests.support.fsdp_kit import Deep, Tied, close, deep, wide
from tests.support.lasting_ranks import ranks
from tests.support.tasks import PlainGAN

# ---------------------------------------------------------------------------------------------------------------------
# Against one process


class Whole(torch.optim.Optimizer):
    """Needs a whole matrix: steps along its products with itself, as Muon does, and makes state when it is made."""

    def __init__(self, parameters: Any, lr: float):
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["steps"] = 0
                self.state[parameter]["sum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, grad = self.state[parameter], parameter.grad
                state["steps"] += 1
                state["sum"] += grad
                if grad.ndim == 2:
                    total = state["sum"]
                    grad = (total @ total.T @ total) / (1e-3 + torch.linalg.matrix_norm(total, 2) ** 3)
                parameter.sub_(grad, alpha=group["lr"] / state["steps"])


class Orthogonal(Deep):
    def configure_optimizers(self) -> Any:
        return Whole(self.parameters(), lr=0.01)


def stacks() -> dict[str, Any]:
    return {
        "levers": lambda: (deep(), [Accumulate(3), Clip(0.5), EMA(0.9), Schedule("linear"), Guard("skip")]),
        "whole matrices": lambda: (deep(Orthogonal), [Accumulate(2), Clip(max_norm=None, max_value=0.01)]),
        "two optimizers": lambda: (PlainGAN().double(), [Accumulate(2), Clip(0.5)]),
        "frozen": lambda: (deep(), [Freeze(["blocks.0", "*.bias"], thaw="1 epoch"), Accumulate(2)]),
        "tied": lambda: (Tied(), [Clip(0.5, norm_type=float("inf"))]),
    }


def run_stack(name: str, stage: int) -> dict[str, Any]:
    torch.manual_seed(5)
    task, plugins = stacks()[name]()
    several = [Zero(stage=stage)] if "RANK" in os.environ else []
    return fit(task, [*plugins, *several])


def fit(task: forge.TaskModule, plugins: list[Any], **options: Any) -> dict[str, Any]:
    return fitted(task, plugins, wide(), wide(1), **options)


SLOW = [(count, name, stage) for count in (2, 4) for name in stacks() for stage in (1, 2)]
QUICK = [(2, "levers", 2)]


@pytest.mark.parametrize(
    ("count", "name", "stage"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in QUICK),
        *(pytest.param(8, "levers", stage, marks=pytest.mark.slow) for stage in (1, 2)),
    ],
)
def test_ranks_with_divided_state_train_what_one_trains(count: int, name: str, stage: int) -> None:
    alone, together = run_stack(name, stage), ranks(count)(run_stack, name, stage)
    for rank in together:
        close(rank, alone, 1e-11)
        assert all(torch.equal(value, rank["weights"][key]) for key, value in together[0]["weights"].items())
    assert sum(rank["held"]["state"] for rank in together) == alone["held"]["state"]  # every byte once
    assert max(rank["held"]["state"] for rank in together) < alone["held"]["state"]


def with_strategy(kind: type[forge.Plugin]) -> dict[str, Any]:
    return fit(deep(), [Accumulate(2), Clip(0.5), kind()])


def test_stage_one_is_ddp_bit_for_bit() -> None:
    ours, theirs = ranks(2)(with_strategy, Zero), ranks(2)(with_strategy, DDP)
    for rank in range(2):
        for name, value in theirs[rank]["weights"].items():
            assert torch.equal(ours[rank]["weights"][name], value), name


# ---------------------------------------------------------------------------------------------------------------------
# What is sent


def traffic(stage: int, window: int) -> list[dict[str, Any]]:
    """The numbers of values that each update sums on owners and sends back, and the gradients that stay."""
    seen: list[dict[str, Any]] = [{"reduce": [], "broadcast": [], "gradients": 0}]
    reduce, send = dist.reduce, rank_env.broadcast_coalesced

    def reduced(tensor: Tensor, *args: Any, **options: Any) -> Any:
        seen[-1]["reduce"].append(tensor.numel())
        return reduce(tensor, *args, **options)

    def sent(group: Any, tensors: Any, *args: Any) -> Any:
        seen[-1]["broadcast"].append(sum(tensor.numel() for tensor in tensors))
        return send(group, tensors, *args)

    @forge.on("start")
    def begin(trainer: forge.Trainer) -> None:
        seen[-1]["broadcast"].clear()  # the first weights

    @forge.on("inspect_grads")
    def look(step: forge.Step) -> None:
        seen[-1]["gradients"] = sum(p.grad.numel() for p in step.parameters() if p.grad is not None)

    @forge.on("step_end")
    def next_one(step: forge.Step) -> None:
        seen.append({"reduce": [], "broadcast": [], "gradients": 0})

    dist.reduce, rank_env.broadcast_coalesced = reduced, sent
    try:
        fit(deep(), [Accumulate(window), Zero(stage=stage), begin, look, next_one], validate_every=None, max_epochs=1)
    finally:
        dist.reduce, rank_env.broadcast_coalesced = reduce, send
    return seen[:-1]


@pytest.mark.parametrize(("stage", "window"), [(1, 2), (2, 2)])
def test_an_update_sends_what_the_formula_says(stage: int, window: int) -> None:
    every = sum(parameter.numel() for parameter in deep().parameters())
    by_rank = ranks(2)(traffic, stage, window)
    for updates in by_rank:
        assert len(updates) == 2
        for update in updates:
            assert len(update["broadcast"]) == 2  # one message of each owner
            assert sum(update["broadcast"]) == every
            # stage 1: torch's DDP sums. Stage 2: every gradient goes to its owner, in every micro-batch
            assert sum(update["reduce"]) == (0 if stage == 1 else window * every)
    for pair in zip(*by_rank, strict=True):
        held = [update["gradients"] for update in pair]
        assert held == [every, every] if stage == 1 else sum(held) == every


def test_parameters_are_divided_by_size() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (5, 90, 40, 45, 1)]
    owners = owners_of(parameters, 2)
    loads = [sum(p.numel() for p in parameters if owners[id(p)] == rank) for rank in (0, 1)]
    assert sorted(loads) == [90, 91]


# ---------------------------------------------------------------------------------------------------------------------
# Refused


class Unused(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Linear(2, 2, dtype=torch.float64)


def unused() -> None:
    fit(deep(Unused), [Zero(stage=2)])


def test_a_parameter_without_a_gradient_is_refused_by_name() -> None:
    for said in ranks(2).errors(unused):
        assert said.startswith((f"{TaskError.__name__}: zero.stage=2: a micro-batch gave no gradient to", "PeerFailed"))
        assert "spare.weight" in said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"stage": 3}, "zero.stage is 3; it must be 1 or 2. To divide parameters, use fsdp"),
        ({"stage": 2, "compress": "bf16"}, "zero.compress belongs to zero.stage=1"),
        ({"watchdog": 0}, "zero.watchdog is 0"),
    ],
)
def test_a_wrong_option_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        Zero(**values)


@pytest.mark.parametrize(
    ("plugins", "said"),
    [
        ([Zero(), FSDP()], "strategy"),
        ([Zero(), DDP()], "strategy"),
        ([Zero(stage=2), AMP("fp16")], "or zero.stage=1"),
        ([Zero(stage=2), SAM()], "sam needs all gradients"),
    ],
)
def test_a_stack_that_makes_no_sense_is_refused(plugins: list[Any], said: str) -> None:
    with pytest.raises(StackError, match=said):
        fit(deep(), plugins)


class Curved(Deep):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def curved() -> None:
    fit(deep(Curved), [Zero()])


def test_an_optimizer_that_cannot_be_divided_is_refused() -> None:
    assert all("LBFGS steps all parameters by what it knows of all" in said for said in ranks(2).errors(curved))


def test_one_process_alone_trains_with_it_too() -> None:
    ours = fit(deep(), [Zero(stage=2), Clip(0.5)])
    close(ours, fit(deep(), [Clip(0.5)]))
