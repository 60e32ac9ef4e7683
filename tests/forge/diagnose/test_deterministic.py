"""deterministic=True: every switch is set and put back, and an operation that forbids it is named with what to do."""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.diagnose import deterministic, nondeterminism
from forge.diagnose.deterministic import CUBLAS, deterministic_flags
from forge.errors import DeterminismError
from tests.support.tasks import Classifier, fit, make_batches, noting

cudnn: Any = torch.backends.cudnn


def inductor() -> Any:
    """The compiler's settings; importing them takes a second, so not while tests are collected."""
    from torch._inductor import config

    return config


def now() -> tuple[Any, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
        inductor().deterministic,
        os.environ.get(CUBLAS),
    )


ON = (True, False, True, False, True, ":4096:8")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whatever a test sets is gone after it, and no variable of the machine's is in the way."""
    monkeypatch.delenv(CUBLAS, raising=False)
    monkeypatch.setattr(deterministic, "_in_time", False)
    benchmark, exact = cudnn.benchmark, cudnn.deterministic
    yield
    torch.use_deterministic_algorithms(False)
    cudnn.benchmark, cudnn.deterministic = benchmark, exact


# -- the switches -----------------------------------------------------------------------------------------------------


def test_every_switch_is_set_during_a_run_and_put_back_after() -> None:
    cudnn.benchmark = True
    before = now()
    watch, seen = noting("step_end", lambda step: now())
    fit(plugins=[watch], max_updates=1, deterministic=True)
    assert seen == [ON]
    assert now() == before
    assert before[3] is True


def test_without_it_no_switch_is_touched() -> None:
    before = now()
    watch, seen = noting("step_end", lambda step: now())
    fit(plugins=[watch], max_updates=1)
    assert seen == [before]


class Fails(Classifier):
    def __init__(self, where: str):
        super().__init__()
        self.where = where

    def training_step(self, batch: Any) -> Any:
        if self.where == "step":
            raise ZeroDivisionError
        return super().training_step(batch)

    def configure_optimizers(self) -> Any:
        if self.where == "build":
            raise ZeroDivisionError
        return super().configure_optimizers()


@pytest.mark.parametrize("where", ["step", "build"])
def test_an_error_puts_every_switch_back(where: str) -> None:
    before = now()
    with pytest.raises(ZeroDivisionError):
        fit(Fails(where), deterministic=True)
    assert now() == before


def test_what_the_user_had_set_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS, ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn.deterministic, cudnn.benchmark = True, True
    before = now()
    with deterministic_flags(True):
        assert now() == (*ON[:-1], ":16:8")
    assert now() == before


# -- cuBLAS reads its variable when it starts -------------------------------------------------------------------------


def warned(caplog: pytest.LogCaptureFixture) -> bool:
    said = [record.getMessage() for record in caplog.records if CUBLAS in record.getMessage()]
    caplog.clear()
    return bool(said)


def test_cuda_that_was_in_use_without_the_variable_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="forge")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with deterministic_flags(True):
        pass
    assert warned(caplog)
    monkeypatch.setenv(CUBLAS, ":4096:8")
    with deterministic_flags(True):
        pass
    assert not warned(caplog)


# -- an operation that has no deterministic form ----------------------------------------------------------------------


class Puts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone().put_(torch.tensor([0]), torch.zeros(1))


class Forward(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), Puts(), nn.Linear(8, 3))


MESSAGE = (
    "{} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'. You can "
    "turn off determinism just for this operation, or you can use the 'warn_only=True' option."
)


def kernel(name: str) -> Any:
    """A hook that fails as a kernel of torch's does in backward: no line of it is the user's."""
    scope: dict[str, Any] = {"message": MESSAGE.format(name)}
    exec(compile("def fail(grad): raise RuntimeError(message)", "<kernel>", "exec"), scope)
    return scope["fail"]


class Backward(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.ones(8))

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        larger = self.drop(self.norm(x)) * self.scale  # the line to be named
        larger.register_hook(kernel("upsample_bicubic2d_backward_out_cuda"))
        return F.cross_entropy(self(larger), y)


def refused(task: Any, **options: Any) -> Any:
    with pytest.raises(DeterminismError) as caught:
        fit(task, **{"deterministic": True, **options})
    return caught.value


def line_of(code: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(code)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_the_op_is_named_with_line_module_and_replacement() -> None:
    error = refused(Forward())
    told, (where,) = str(error), error.__notes__
    assert where.startswith("forge: raised in Forward.training_step, at update 0")
    assert told.startswith("deterministic=True, but put_ has no deterministic implementation.")
    assert f"{Path(__file__)}:{line_of(Puts.forward, 'put_')}, in the module net.1 (Puts)." in told
    assert "x.index_put_((index,), values)" in told
    assert "trainer.deterministic=false" in told


def test_in_backward_the_line_of_the_forward_pass_is_named() -> None:
    told = str(refused(Backward()))
    line = line_of(Backward.training_step, "the line to be named")
    assert "but upsample_bicubic2d_backward_out_cuda has" in told
    assert f"It is in the backward of what was called at {Path(__file__)}:{line}." in told
    assert "mode='nearest'" in told


def test_looking_for_the_line_changes_no_buffer_or_rng() -> None:
    task, plain = Backward(), Backward()
    refused(task, seed=3)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    plain.drop(plain.norm(make_batches()[0][0]))  # the one forward pass of the run itself
    assert torch.equal(after, torch.get_rng_state())
    for one, other in zip(task.norm.buffers(), plain.norm.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("operation", "advice"),
    [
        ("grid_sampler_2d_backward_cuda", "F.grid_sample on the CPU"),
        ("cumsum_cuda_kernel", "triangular matrix"),
        ("something_new_cuda", nondeterminism.OTHERWISE),
    ],
)
def test_a_known_operation_has_its_replacement_and_any_other_a_cure(operation: str, advice: str) -> None:
    trainer = forge.Trainer(max_updates=1, plugins=[], deterministic=True)
    trainer.task = Classifier()
    told = nondeterminism.explanation(trainer, RuntimeError(MESSAGE.format(operation)))
    assert told.startswith(f"deterministic=True, but {operation} has no deterministic implementation.")
    assert advice in told
