"""fp8 without a GPU: the products are computed by a reference, everything else is the code that runs on one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forge
from forge.errors import RecipeError, StackError, TaskError
from forge.testing import TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import (
    AMP,
    DDP,
    FSDP,
    Accumulate,
    Checkpoint,
    Remat,
    TensorParallel,
)
from forge_ship.qat import QAT
from forge_speed import fp8
from forge_speed.fp8 import FP8, linear, linear_layers
from tests.support import reference
from tests.support.averages import loss_of
from tests.support.float8 import emulate
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some


@pytest.fixture
def emulated() -> Iterator[None]:
    """Compute in float8 on the CPU, in layers of any size and for any number of rows."""
    with emulate(tile=1):
        yield


def by_hand(window: int = 1, **options: Any) -> TinyTask:
    """Train a TinyTask with layers in float8 in a plain loop."""
    task = TinyTask(**options)
    for layer in linear_layers(task).values():
        linear.install(layer, 1)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.9)
    reference.train(task, loss_of, optimizer, tiny_batches(), 2, window=window, seed=0)
    return task


# -- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2])
def test_a_fit_is_a_plain_loop_in_float8(window: int, emulated: None) -> None:
    task, _ = fit_tiny([FP8("all"), Accumulate(window)])
    assert_same(task, by_hand(window))
    plain, _ = fit_tiny([Accumulate(window)])
    assert any(not torch.equal(a, b) for a, b in zip(task.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("modules", some(["Sequential", "Linear"], quick=1))
@pytest.mark.parametrize("first", [True, False])
def test_recomputed_blocks_compute_the_same(modules: str, first: bool, emulated: None) -> None:
    stack: list[Any] = [FP8("all"), Remat(modules)]
    task, _ = fit_tiny(stack if first else stack[::-1])
    assert_same(task, by_hand())
    assert not any("forward" in vars(module) for module in task.modules())


# -- the task ---------------------------------------------------------------------------------------------------------


def test_the_task_is_itself_again_after_a_fit(emulated: None) -> None:
    before = TinyTask()
    task, _ = fit_tiny([FP8("all")])
    assert task.state_dict().keys() == before.state_dict().keys()
    for layer, plain in zip(task.modules(), before.modules(), strict=True):
        assert vars(layer).keys() - {"trainer"} == vars(plain).keys() - {"trainer"}


def test_a_run_can_go_on_without_it(tmp_path: Path, emulated: None) -> None:
    fit_tiny([FP8("all"), Checkpoint()], run_dir=tmp_path, max_epochs=1)
    saved = TinyTask.from_checkpoint(tmp_path / "checkpoints" / "latest")
    assert saved.state_dict().keys() == TinyTask().state_dict().keys()
    _, result = fit_tiny([Checkpoint()], run_dir=tmp_path / "more", resume=tmp_path / "checkpoints" / "latest")
    assert result.updates == 10


# -- several ranks ----------------------------------------------------------------------------------------------------


def fit_on_this_rank(strategy: str, float8: bool = True) -> dict[str, Tensor]:
    """With fsdp each layer is a unit, whose gathered weight is freed between forward and backward."""
    plugin = DDP() if strategy == "ddp" else FSDP("Linear")
    with emulate(tile=1):
        task, _ = fit_tiny([*([FP8("all")] if float8 else []), plugin], task=TinyTask(dropout=0.0), max_epochs=1)
    return {name: value.detach().clone() for name, value in task.named_parameters()}


@pytest.mark.slow
def test_sharded_weights_train_as_whole_ones() -> None:
    pair = ranks(2)
    whole, _ = pair(fit_on_this_rank, "ddp")
    plain, _ = pair(fit_on_this_rank, "ddp", False)
    for sharded in pair(fit_on_this_rank, "fsdp"):
        assert all(torch.equal(sharded[name], value) for name, value in whole.items())
    assert not torch.equal(whole["net.0.weight"], plain["net.0.weight"])


# -- which layers -----------------------------------------------------------------------------------------------------


class Sizes(TinyTask):
    """Layers of several sizes, without memory until they are used."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.blocks = nn.ModuleList([nn.Linear(768, 3072), nn.Linear(2048, 2048), nn.Linear(2050, 2048)])
            self.head = nn.Linear(768, 50304, bias=False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["blocks.1", "head"]),
        ({"leave_out": "head"}, ["blocks.1"]),
        ({"layers": "all"}, ["blocks.0", "blocks.1", "head"]),
        ({"layers": "blocks.[01]"}, ["blocks.0", "blocks.1"]),
        ({"layers": "blocks", "leave_out": ["blocks.0", "blocks.2"]}, ["blocks.1"]),
    ],
)
def test_layers_are_chosen_by_size_or_by_name(options: dict[str, Any], expected: list[str]) -> None:
    assert list(FP8(**options)._choose(Sizes())) == expected


def test_on_a_cpu_everything_runs_as_written(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "forge"):
        task, _ = fit_tiny([FP8()])
    assert_same(task, fit_tiny()[0])
    assert "fp8: everything runs as written: float8 runs on CUDA, and this run is on cpu." in caplog.text


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    with pytest.raises(RecipeError, match=r"fp8: Old GPU has no float8 units: its compute capability is 8.0, and 8.9"):
        fp8.acts_on(torch.device("cuda"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layers": []}, RecipeError, "fp8.layers is an empty list"),
        (
            {"layers": "nat.*"},
            RecipeError,
            r"fp8.layers: 'nat.\*' matches no nn.Linear of TinyTask. They are net.0, net.4",
        ),
        ({"leave_out": "net.1"}, RecipeError, "fp8.leave_out: 'net.1' matches no nn.Linear"),
        ({"layers": "net.4"}, RecipeError, "fp8.layers: net.4 is 8 × 3 in float32; float8 needs multiples of 16"),
        ({"layers": "all"}, TaskError, "TinyTask has no nn.Linear whose sizes are multiples of 16"),
    ],
)
def test_what_cannot_be_chosen_is_refused(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        fit_tiny([FP8(**options)])


@pytest.mark.parametrize("beside", [[QAT()], [AMP("fp16")], [FSDP(), TensorParallel(size=2, plan={"net.0": "column"})]])
def test_what_replaces_or_splits_the_layers_is_refused(beside: list[forge.Plugin]) -> None:
    with pytest.raises(StackError, match=r"(?s)'fp8'"):
        fit_tiny([FP8(), *beside])
