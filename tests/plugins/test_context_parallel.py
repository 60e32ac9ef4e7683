"""context_parallel: ranks that hold a slice of every sequence train what one process trains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn import functional

import forge
from forge.errors import DataError, RecipeError, StackError, TaskError
from forge_plugins import AMP, DDP, EMA, FSDP, Accumulate, Clip, Compile, CudaGraph, Freeze, Guard, Kernels, Remat
from forge_plugins import SAM, ContextParallel, Schedule
from forge_plugins.context_parallel.slices import Slicing
from tests.support import context_kit as kit
from tests.support.fsdp_kit import close
from tests.support.lasting_ranks import ranks

# ---------------------------------------------------------------------------------------------------------------------
# Against one process


def kinds() -> dict[str, Any]:
    return {
        "levers": lambda: (
            kit.Tokens(),
            [Accumulate(3), Clip(0.5), EMA(0.9), Remat("Layer"), Schedule("linear"), Guard("skip")],
        ),
        "both sides": lambda: (kit.Full(), [Accumulate(2)]),
        "counted items": lambda: (kit.Counting(), [Accumulate(3), Clip(0.5)]),
        "padded": lambda: (kit.Padded(), [Accumulate(2), Guard()]),
        "frozen": lambda: (kit.Tokens(), [Freeze(["blocks.0", "places"], thaw="1 epoch")]),
        "sam": lambda: (kit.Tokens(), [SAM(0.05), Accumulate(2), Clip(0.5)]),
        "stranger": lambda: (kit.Stranger(), [Clip(0.5)]),
        "compiled": lambda: (kit.Tokens(), [Compile(backend="aot_eager", blocks="Layer"), Accumulate(2)]),
    }


def run(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    task, plugins = kinds()[kind]()
    return kit.fit_tokens(task, plugins, {**options, **({"positions": "arange"} if kind == "stranger" else {})})


QUICK = [
    (2, "levers", {}),
    (2, "both sides", {"method": "alltoall"}),
    (2, "padded", {}),
    (2, "stranger", {}),
    (4, "counted items", {"size": 2, "balance": False}),
]
SLOW = [
    *((count, kind, {}) for count in (2, 4) for kind in kinds()),
    *((8, kind, {}) for kind in ("levers", "both sides", "counted items", "padded")),
    (8, "levers", {"balance": False, "method": "alltoall"}),
    (8, "levers", {"size": 4, "method": "alltoall"}),
    (8, "padded", {"size": 2}),
]


@pytest.mark.parametrize(
    ("count", "kind", "options"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in QUICK)],
)
def test_slices_train_what_one_process_trains(count: int, kind: str, options: dict[str, Any]) -> None:
    alone, together = run(kind, {}), ranks(count)(run, kind, options)
    for rank in together:
        close(rank, alone, 1e-11)
        assert all(torch.equal(value, rank["weights"][key]) for key, value in together[0]["weights"].items())


MESHES = [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)]


@pytest.mark.slow
@given(
    st.sampled_from([kind for kind in kinds() if kind != "compiled"]),
    st.sampled_from(MESHES),
    st.sampled_from(["allgather", "alltoall"]),
    st.booleans(),
)
@settings(max_examples=16, deadline=None)
def test_any_mesh_method_and_balance(kind: str, mesh: tuple[int, int], method: str, balance: bool) -> None:
    count, size = mesh
    alone = run(kind, {})
    for rank in ranks(count)(run, kind, {"size": size, "method": method, "balance": balance}):
        close(rank, alone, 1e-11)
