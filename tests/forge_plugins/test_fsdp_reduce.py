"""fsdp.reduce: gradients that stay sharded while a window accumulates, and what they take."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest
from torch import Tensor

import forge
from forge.optim.sharded import local
from forge_plugins import EMA, Accumulate, Clip
from forge_plugins.fsdp import FSDP
from tests.support.fsdp_kit import close, deep, train, wide
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some


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


def reductions(options: dict[str, Any]) -> int:
    """How many reduce-scatters a window of three micro-batches takes."""
    from torch import distributed as dist

    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    send, counts = getattr(dist, name), []

    def counted(*args: Any, **given: Any) -> Any:
        counts.append(1)
        return send(*args, **given)

    setattr(dist, name, counted)
    try:
        plugins = [Accumulate(3), FSDP(**options)]
        train(deep(), plugins, wide(sizes=(8,) * 3), validate_every=None, max_epochs=1)
    finally:
        setattr(dist, name, send)
    return len(counts)


@pytest.mark.slow
def test_it_sends_gradients_as_often_as_there_are_micro_batches() -> None:
    once, often = (ranks(2)(reductions, options)[0] for options in ({}, {"reduce": "micro"}))
    assert often == 3 * once > 0
