"""compile: compared with eager; its small parts; generated code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge.testing import TinyGAN, TinyTask, assert_same_weights
from forge_plugins import Compile
from forge_plugins.compile.comparison import furthest
from forge_plugins.compile.compile_watch import Recompile
from tests.support import compile_kit
from tests.support.compile_kit import Plain, counts, fit

nothing_of_the_last_test = compile_kit.nothing_of_the_last_test
every_line = compile_kit.every_line


# ---------------------------------------------------------------------------------------------------------------------
# Against eager


class Odd(nn.Module):
    """Gives something else when it is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.1 if torch.compiler.is_compiling() else x


def odd() -> TinyTask:
    task: Any = TinyTask()
    task.net[2] = nn.Sequential(nn.ReLU(inplace=True), Odd(), nn.Identity())
    return task


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (Plain, None),
        (TinyTask, "Sequential"),
        pytest.param(TinyTask, None, marks=pytest.mark.slow),
        pytest.param(TinyGAN, None, marks=pytest.mark.slow),
    ],
)
def test_comparing_leaves_no_trace_in_the_run(make: Any, blocks: str | None, caplog: pytest.LogCaptureFixture) -> None:
    plain, compared = make(), make()
    result = fit(Compile(backend="aot_eager", blocks=blocks), plain, validate_every=None)[1]
    again = fit(Compile(backend="aot_eager", blocks=blocks, compare=True), compared, validate_every=None)[1]
    assert_same_weights(compared, plain)
    assert counts(again) == counts(result)
    assert "compiled and eager agree on the first batch bit for bit. Forward and backward take " in caplog.text
    assert " ms compiled, " in caplog.text


def test_a_difference_that_is_too_large_names_torchs_minifier(caplog: pytest.LogCaptureFixture) -> None:
    fit(Compile(backend="eager", compare=True), odd(), max_updates=1)
    assert "compiled and eager disagree on the first batch: they differ by" in caplog.text
    assert "0.001 is allowed for float32" in caplog.text
    assert "TORCHDYNAMO_REPRO_AFTER=aot" in caplog.text


@pytest.mark.parametrize(
    ("ours", "theirs", "name", "relative"),
    [
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.0]}, "a", 0.0),
        ({"a": [1.0, 2.5], "b": [0.0]}, {"a": [1.0, 2.0], "b": [0.0]}, "a", 0.25),
        ({"a": [float("nan")]}, {"a": [float("nan")]}, "a", 0.0),
        ({"a": [float("nan")]}, {"a": [1.0]}, "a", float("inf")),
        ({"a": [1.0]}, {"a": [1.0], "b": [1.0]}, "b", 1.0),
        ({"a": [1.0, 1.0]}, {"a": [1.0]}, "a", float("inf")),
        ({"a": [1e-3]}, {"a": [0.0]}, "a", float("inf")),
        # a gradient that should be 0 is noise in both: it is held against the others
        (
            {"the gradient of w": [10.0], "the gradient of b": [2e-6]},
            {"the gradient of w": [10.0], "the gradient of b": [1e-6]},
            "the gradient of b",
            1e-4,
        ),
    ],
)
def test_differences_are_relative_to_the_size_of_a_tensor(ours: Any, theirs: Any, name: str, relative: float) -> None:
    tensors = [{key: torch.tensor(values) for key, values in side.items()} for side in (ours, theirs)]
    found = furthest(*tensors, tolerance=1e-3)
    assert (found.name, found.relative) == (name, pytest.approx(relative))


# ---------------------------------------------------------------------------------------------------------------------
# The small parts


@pytest.mark.parametrize(
    ("reason", "expected", "short"),
    [
        ("tensor 'batch[0]' size mismatch at index 0. expected 8, actual 5", False, (5, 8)),
        ("tensor 'batch[0]' size mismatch at index 0. expected 5, actual 8", False, None),
        ("tensor 'batch[0]' size mismatch at index 1. expected 8, actual 5", False, None),
        ("tensor 'args[0]' requires_grad mismatch. expected requires_grad=0", True, None),
        ("GLOBAL_STATE changed: grad_mode", True, None),
        ("self._modules['net'].training  # if self.training:  # a.py:3 in forward", True, None),
        ("not self.training  # _dynamo/guards.py:3 in build", True, None),
        ("self.__dict__['training'] == True", True, None),
        ("___stack0 == 3.4  # if z.sum().item() > 0  # a.py:30 in forward", False, None),
        ("self.scale == 1  # if self.training:  # a.py:3 in forward", False, None),
        ("self.scale == 1  # x = x * self.scale  # training/a.py:3 in forward", False, None),
        ("self.scale == 1  # x = x * self.scale  # my training/a.py:3 in forward", False, None),
        ("self.training_scale == 1", False, None),
        ("batch['training'] == 1", False, None),
    ],
)
def test_reasons_are_told_apart(reason: str, expected: bool, short: Any) -> None:
    again = Recompile.read("training_step", f"0/0: {reason}")
    assert (again.expected, again.short_batch) == (expected, short)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (
            "0/0: tensor 'x' size mismatch at index 0. expected 2, actual 3",
            "tensor 'x' size mismatch at index 0. expected 2, actual 3",
        ),
        (
            "4/1: ___stack0 == 3.8      # if z.item() > 0:  # cr/a.py:30 in resume\nUser stack trace:\n ...",
            "no longer ___stack0 == 3.8, at cr/a.py:30: if z.item() > 0:",
        ),
        (
            "0/1: self.k == 1    # x * self.k  # cr/a.py:7 in forward (HINT: integers are static.\nOr not.)\n ...",
            "no longer self.k == 1, at cr/a.py:7: x * self.k",
        ),
        ("0/1: self.k == 1 (HINT: make it a tensor.)", "self.k == 1"),
    ],
)
def test_torchs_reasons_are_told_in_one_line(reason: str, told: str) -> None:
    assert Recompile.read("training_step", reason).reason == told


# ---------------------------------------------------------------------------------------------------------------------
# Generated code


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"blocks": "Sequential"}, {"mode": "max-autotune-no-cudagraphs"}])
def test_generated_code_trains_as_eager_does(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    plain, compiled = TinyTask(dropout=0.0), TinyTask(dropout=0.0)
    fit(None, plain)
    result = fit(Compile(**options, compare=True), compiled)[1]
    for (name, ours), theirs in zip(compiled.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert counts(result)[1:] == (0, 0)
    assert "compiled and eager agree on the first batch" in caplog.text
