"""cuda_graph without a CUDA device: what it says, what it refuses, and that it changes nothing."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

import forge
from forge.contract.step import Step
from forge.diagnose.syncs import own_line
from forge.errors import StackError
from forge.testing import assert_same
from forge_plugins import DDP, SAM, Compile, CudaGraph
from forge_plugins.cuda_graph.fitness import make_capturable
from forge_plugins.cuda_graph.rates import Rates
from forge_plugins.cuda_graph.window import GraphWindow, Unsuitable
from tests.support.tasks import Classifier, fit


def test_on_a_cpu_it_says_so_once_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain = Classifier()
    fit(plain)
    torch.manual_seed(0)
    task = Classifier()
    with caplog.at_level("INFO", logger="forge"):
        fit(task, plugins=[CudaGraph()])
    assert_same(task, plain)
    assert caplog.text.count("graphs run on CUDA only, and the run is on cpu") == 1


def test_strict_refuses_a_cpu() -> None:
    with pytest.raises(StackError, match=r"on cpu\. Fix that, remove cuda_graph, or set cuda_graph\.strict=false"):
        fit(plugins=[CudaGraph(strict=True)])


@pytest.mark.parametrize(
    ("other", "instead"),
    [
        (SAM, "A graph runs the window once"),
        (lambda: Compile("reduce-overhead"), "Set compile.mode=default"),
        (DDP, "several ranks are not captured"),
    ],
)
def test_what_cannot_be_in_the_same_stack_is_refused_by_name(other: Any, instead: str) -> None:
    with pytest.raises(StackError, match=instead):
        fit(plugins=[CudaGraph(), other()])


# -- rates ------------------------------------------------------------------------------------------------------------


def test_groups_hold_tensors_only_while_the_optimizer_steps() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = SGD([{"params": [weight], "lr": 0.5}, {"params": [torch.nn.Parameter(torch.ones(1))]}], lr=0.25)
    rates = Rates(optimizer, torch.device("cpu"))
    with rates.in_place():
        assert [group["lr"].item() for group in optimizer.param_groups] == [0.5, 0.25]
    optimizer.param_groups[0]["lr"] = 0.125
    with rates.in_place():
        assert optimizer.param_groups[0]["lr"].item() == 0.125
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.25]


def test_torchs_optimizers_are_made_fused_and_capturable() -> None:
    adam, sgd = AdamW([torch.nn.Parameter(torch.ones(1))]), SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for optimizer in (adam, sgd):
        make_capturable(optimizer)
        assert optimizer.param_groups[0]["fused"]
        assert not optimizer.param_groups[0]["foreach"]
    assert adam.param_groups[0]["capturable"]


# -- windows ----------------------------------------------------------------------------------------------------------


def window(*batches: Any, items: Any = None) -> GraphWindow:
    trainer = forge.Trainer(max_updates=1, plugins=[])
    return GraphWindow(Step(trainer, window=batches, items=items or [1] * len(batches)), torch.device("cpu"))


def test_windows_of_one_shape_share_a_key_whatever_their_numbers() -> None:
    first = window({"x": torch.ones(2, 3), "kind": "a"}, {"x": torch.ones(4, 3), "kind": "a"})
    second = window({"x": torch.zeros(2, 3), "kind": "a"}, {"x": torch.zeros(4, 3), "kind": "a"})
    assert first.key == second.key
    assert [tuple(tensor.shape) for tensor in first.tensors] == [(2, 3), (4, 3)]


@pytest.mark.parametrize(
    "other",
    [
        ({"x": torch.ones(3, 3)},),
        ({"x": torch.ones(2, 3, dtype=torch.float64)},),
        ({"x": torch.ones(3, 2).T},),
        ({"y": torch.ones(2, 3)},),
        ({"x": torch.ones(2, 3)}, {"x": torch.ones(2, 3)}),
        ({"x": torch.ones(2, 3), "kind": 1},),
    ],
)
def test_another_shape_dtype_name_or_value_has_another_key(other: Any) -> None:
    assert window(*other).key != window({"x": torch.ones(2, 3)}).key


def test_a_batch_that_hides_its_tensors_is_unsuitable() -> None:
    class Opaque:
        tensor = torch.ones(1)

    with pytest.raises(Unsuitable, match="a batch holds a Opaque"):
        window(Opaque())


# -- where a step reads the device ------------------------------------------------------------------------------------


def test_of_an_error_within_torch_the_users_line_is_shown() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2).view(3)
    assert "(torch.ones(2).view(3))" in own_line(traceback.extract_tb(caught.tb))
