"""What clip_adamw and ClipAdamW refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge.errors import KernelError
from forge_kernels.ops.clip_adamw import clip_adamw
from forge_kernels.ops.clip_adamw_optimizer import ClipAdamW
from tests.support.clip_adamw_kit import OPTIONS, lists, network


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grads": []}, "1 parameters, 0 gradients"),
        ({"grads": [torch.ones(4)]}, r"parameter 0.*\(5,\), \(4,\), \(5,\), \(5,\)"),
        ({"step": [torch.zeros(())] * 2}, "2 step counters"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\)"),
        ({"max_norm": -1.0}, "max_norm is -1.0"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"weight_decay": -3.0}, "weight_decay is -3.0"),
        ({"params": [torch.arange(5)]}, "parameter 0 is int64"),
        ({"grads": [torch.ones(5, dtype=torch.complex64)]}, "gradient 0 is complex64"),
        ({"grads": [None]}, "gradient 0 is NoneType"),
        ({"exp_avg_sqs": [torch.arange(5)]}, "moment 0 is int64"),
        ({"step": torch.tensor(3)}, "step counter 0 is int64"),
    ],
)
@pytest.mark.parametrize("interpreted", [True, False])
def test_senseless_arguments_are_refused_on_both_paths(change, message, interpreted, monkeypatch):
    monkeypatch.setattr("forge_kernels.contract.INTERPRETED", interpreted)
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "step")
    arguments = {**dict(zip(names, lists([(5,)]), strict=True)), **OPTIONS, **change}
    with pytest.raises(KernelError, match=message):
        clip_adamw(**arguments)


def test_the_same_tensor_twice_is_refused():
    for place in (0, 2):
        args = lists([(5,), (5,)])
        args[place] = [args[place][0]] * 2
        with pytest.raises(KernelError, match="the same tensor twice"):
            clip_adamw(*args, **OPTIONS)
    args = lists([(5,)])
    args[3] = args[2]
    with pytest.raises(KernelError, match="the same tensor twice"):
        clip_adamw(*args, **OPTIONS)


def test_a_parameter_twice_in_a_group_is_refused():
    param = nn.Parameter(torch.ones(3))
    with (
        pytest.raises(KernelError, match="the same parameter twice"),
        pytest.warns(UserWarning, match="duplicate parameters"),
    ):
        ClipAdamW([param, param])


def test_a_negative_norm_is_refused():
    with pytest.raises(KernelError, match=r"max_norm is -1\.0"):
        ClipAdamW(network().parameters(), max_norm=-1.0)
