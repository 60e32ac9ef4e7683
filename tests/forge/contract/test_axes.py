"""Axes: sizes of a mesh, which plugins combine, and what is said where they do not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge
from forge.contract import axes
from forge.contract.stack import Stack
from forge.errors import ForgeError, StackError
from forge_cluster.context_parallel import ContextParallel
from forge_cluster.expert_parallel import ExpertParallel
from forge_cluster.pipeline import Pipeline
from forge_cluster.torchft import Torchft
from forge_cluster.zero import Zero
from forge_plugins import AMP, DDP, FSDP
from forge_plugins.tensor_parallel import TensorParallel
from tests.support.profiles import few

EVERY: list[Any] = [
    *(DDP(), FSDP(), Zero(), Pipeline(), ContextParallel(), ExpertParallel()),
    TensorParallel(plan={"Linear": "column"}),
]
KINDS = axes.kinds(EVERY)
PLAN: Any = {"Linear": "column"}


def test_axes_lie_from_slow_links_to_fast_ones() -> None:
    assert axes.ordered(reversed(KINDS), KINDS) == ["data", "shard", "expert", "pipe", "context", "tensor"]


@pytest.mark.parametrize(
    ("asked", "world", "shape"),
    [
        ({"data": 0}, 4, {"data": 4}),
        ({}, 4, {"data": 4}),
        ({"tensor": 2}, 8, {"data": 4, "tensor": 2}),
        ({"shard": 0, "tensor": 2}, 8, {"shard": 4, "tensor": 2}),
        ({"shard": 0, "data": 2, "tensor": 2}, 8, {"data": 2, "shard": 2, "tensor": 2}),
        ({"data": 0, "context": 0}, 4, {"data": 1, "context": 4}),
        ({"shard": 0, "pipe": 0, "tensor": 2}, 8, {"shard": 1, "pipe": 4, "tensor": 2}),
        ({"data": 0, "theirs": 2}, 4, {"data": 2, "theirs": 2}),
    ],
)
def test_the_innermost_open_axis_takes_what_is_left(asked: Any, world: int, shape: Any) -> None:
    found = axes.shape_of({}, asked, KINDS, world)
    assert list(found.items()) == list(shape.items())


def test_a_given_mesh_is_the_whole_of_it() -> None:
    given_mesh = {"tensor": 2, "shard": 4, "expert": 1}
    assert axes.shape_of(given_mesh, {"shard": 0, "tensor": 0}, KINDS, 8) == {"shard": 4, "tensor": 2}
    assert axes.shape_of({"data": 2, "shard": 2}, {"shard": 0}, KINDS, 4) == {"data": 2, "shard": 2}
    with pytest.raises(StackError, match=r"A plugin asks for 4 ranks along 'tensor', but trainer.mesh has 2"):
        axes.shape_of(given_mesh, {"shard": 0, "tensor": 4}, KINDS, 8)
    with pytest.raises(StackError, match=r"asks for 2 ranks along 'data', but trainer.mesh has 1"):
        axes.shape_of(given_mesh, {"shard": 0, "data": 2}, KINDS, 8)


@pytest.mark.parametrize(
    ("mesh", "asked", "world", "said"),
    [
        ({"data": 2, "tensor": 2}, {}, 8, "data 2 x tensor 2: that is 4 processes.*trainer.mesh={data: 4, tensor: 2}"),
        ({"shard": 3}, {"shard": 0}, 4, "as shard 3: that is 3 processes.*trainer.mesh={shard: 4}"),
        ({}, {"data": 2, "shard": 0, "tensor": 2}, 6, "6 is no multiple of 4.*mesh={data: 3, shard: 1, tens"),
        ({"pipe": 2}, {"pipe": 0}, 1, "1 processes cannot be arranged as pipe 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_nearest_mesh(mesh: Any, asked: Any, world: int, said: str) -> None:
    with pytest.raises(StackError, match=said):
        axes.shape_of(mesh, asked, KINDS, world)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 64))
@few
def test_the_nearest_mesh_has_all_processes_and_none_is_nearer(sizes: list[int], world: int) -> None:
    wanted = dict(zip("abcd", sizes, strict=False))
    found = axes.nearest(wanted, world)

    def far(mesh: dict[str, int]) -> float:
        return sum(abs(math.log(mesh[axis] / wanted[axis])) for axis in wanted)

    assert math.prod(found.values()) == world
    if math.prod(sizes) == world:
        assert found == wanted
    for axis in wanted:
        for other in wanted:
            if axis != other and found[axis] % 2 == 0:
                moved = {**found, axis: found[axis] // 2, other: found[other] * 2}
                assert far(found) <= far(moved) + 1e-9


@pytest.mark.parametrize(
    ("plugins", "said"),
    [
        ([DDP(), TensorParallel(plan=PLAN)], "'ddp' does not work where ranks divide matrices, as 'tensor_parallel'"),
        ([DDP(), TensorParallel(plan=PLAN)], "tensor: use -p fsdp -p tensor_parallel, or -p pipeline -p tensor_par"),
        ([TensorParallel(plan=PLAN)], "no plugin of this stack averages their gradients. The nearest mesh is tensor"),
        ([ContextParallel(), TensorParallel(plan=PLAN)], "context x tensor: use -p fsdp -p context_parallel -p tensor"),
        (
            [ContextParallel(), Pipeline()],
            "'pipeline' does not work where ranks divide positions, as 'context_parallel",
        ),
        (
            [ContextParallel(), Pipeline()],
            "nearest mesh is shard x pipe: use -p pipeline; or shard x context: use -p f",
        ),
        ([FSDP(), Pipeline()], "both provide 'strategy': only one can.*shard x pipe: use -p pipeline"),
        ([DDP(), FSDP()], "both provide 'strategy': only one can.*nearest mesh is shard: use -p fsdp"),
        ([ExpertParallel()], "divides experts, and no plugin .* nearest mesh is expert: use -p ddp -p expert_parallel"),
        ([Zero(), ExpertParallel()], "'zero' does not work where ranks divide experts, as 'expert_parallel' does"),
        ([DDP(), ExpertParallel(), AMP("fp16")], "Use amp.dtype=bf16"),
        ([DDP(), Zero()], "both provide 'strategy'.*nearest mesh is data: use -p ddp, or -p zero"),
        ([Torchft(), ContextParallel()], "'torchft' does not work where ranks divide positions"),
    ],
)
def test_what_does_not_combine_is_refused_by_name_with_what_does(plugins: list[Any], said: str) -> None:
    with pytest.raises(StackError, match=said):
        Stack(plugins).resolve()


@pytest.mark.parametrize(
    "plugins",
    [
        [FSDP(), TensorParallel(plan=PLAN)],
        [FSDP(), ContextParallel(), TensorParallel(plan=PLAN)],
        [Pipeline(), TensorParallel(plan=PLAN)],
        [DDP(), ContextParallel()],
        [DDP(), ExpertParallel()],
        [FSDP(), ExpertParallel(), TensorParallel(plan=PLAN)],
        [Zero(), ContextParallel()],
    ],
)
def test_what_combines_is_taken_in_any_order(plugins: list[Any]) -> None:
    Stack(plugins).resolve()
    Stack(plugins[::-1]).resolve()


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"pipe": 2}, "trainer.mesh has pipe: 2, but no plugin of this stack divides along 'pipe'. Add -p pipeline."),
        ({"shard": 2, "context": 2}, "no plugin of this stack divides along 'shard'. Add -p fsdp or -p pipeline."),
        ({"shards": 2}, "'shards', which no installed plugin owns; there are data, shard, expert, pipe.*'shard'"),
    ],
)
def test_an_axis_without_an_owner_is_refused_with_the_plugin_to_add(mesh: Any, said: str) -> None:
    with pytest.raises(StackError, match=said):
        axes.refuse_unowned(mesh, [])


def test_the_setting_takes_whole_numbers() -> None:
    with pytest.raises(ForgeError, match=r"mesh.shard=0: it must be a whole number of at least 1"):
        forge.Trainer(max_updates=1, plugins=[], mesh={"shard": 0})
    assert forge.Trainer(max_updates=1, plugins=[], mesh={"data": 1}).settings["mesh"] == {"data": 1}
