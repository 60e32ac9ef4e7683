"""sam: two passes per update, held against the loop that one writes by hand, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import forge
from forge.cli.plugin_page import declared
from forge.errors import RecipeError, StackError
from forge.testing import TinyGAN, TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import SAM, Accumulate, Clip
from tests.support import reference
from tests.support.averages import loss_of
from tests.support.profiles import covering, few
from tests.support.tasks import Classifier
from tests.support.tasks import fit as task_fit


class Decayed(TinyTask):
    """With AdamW, whose decay shows who touches weights."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize(("kind", "adaptive"), covering([TinyTask, Decayed], [False, True]))
@few
@given(
    sizes=st.lists(st.integers(2, 6), min_size=1, max_size=6),
    window=st.integers(1, 3),
    rho=st.sampled_from([0.01, 0.05, 2.0]),
    clip=st.sampled_from([None, 0.5]),
)
def test_it_equals_a_hand_written_loop_bit_for_bit(
    kind: type[TinyTask], adaptive: bool, sizes: list[int], window: int, rho: float, clip: float | None
) -> None:
    """Dropout draws the same numbers twice, BatchNorm learns in the first pass alone, clip clips what is used."""
    ours, theirs, data = kind(), kind(), tiny_batches(sizes)
    plugins = [SAM(rho, adaptive=adaptive), Accumulate(window), *([Clip(clip)] if clip else [])]
    fit_tiny(plugins, task=ours, train=data, log_every=3)
    levers = reference.Levers(window=window, clip_norm=clip, rho=rho, adaptive=adaptive)
    reference.train_with_levers(theirs, loss_of, theirs.configure_optimizers(), data, 2, levers, 0)
    assert_same(ours, theirs)


def test_with_two_optimizers_each_climbs_with_its_own_parameters() -> None:
    climbed: dict[str, list[float]] = {}

    class Measure(TinyGAN):
        def training_step(self, batch: Any, name: str) -> Any:
            other = self.discriminator if name == "generator" else self.generator
            own = self.generator if name == "generator" else self.discriminator
            seen = [torch.cat([p.detach().flatten() for p in net.parameters()]) for net in (own, other)]
            if name in starts:
                climbed[name] = [float((now - then).norm()) for now, then in zip(seen, starts.pop(name), strict=True)]
            else:
                starts[name] = seen
            return super().training_step(batch, name)

    starts: dict[str, list[Tensor]] = {}
    fit_tiny([SAM(0.3)], task=Measure(), max_updates=1)
    assert climbed == {name: [pytest.approx(0.3, rel=1e-5), 0.0] for name in ("generator", "discriminator")}


def test_batch_norm_learns_from_the_second_pass_only_if_asked_to() -> None:
    for freeze_norm, forwards in ((False, 20), (True, 10)):
        task, _ = fit_tiny([SAM(freeze_norm=freeze_norm)])
        assert int(task.net[1].num_batches_tracked) == forwards  # pyright: ignore


# -- what others see --------------------------------------------------------------------------------------------------


def test_gradients_are_made_true_before_climb_and_step() -> None:
    class Scaled(forge.Plugin):
        """The loss times 4, and gradients divided by 4: exact."""

        @forge.hookimpl
        def forge_backward(self, loss: Tensor) -> bool:
            (loss * 4).backward()
            return True

        @forge.hookimpl
        def forge_finalize_grads(self, step: forge.Step) -> None:
            for parameter in step.parameters():
                if parameter.grad is not None:
                    parameter.grad /= 4

    assert_same(fit_tiny([Scaled(), SAM(0.5)])[0], fit_tiny([SAM(0.5)])[0])


def test_metrics_are_of_the_weights_and_sharpness_of_the_climb() -> None:
    losses: list[float] = []

    class Told(TinyTask):
        def training_step(self, batch: Any) -> Any:
            output = super().training_step(batch)
            losses.append(output["loss"].item())
            return output

    _, result = fit_tiny([SAM(0.5)], task=Told(), train=tiny_batches([4]), max_epochs=1)
    assert result.metrics["train/loss"] == losses[0] != losses[1]
    assert result.metrics["sharpness"] == pytest.approx(losses[1] - losses[0])
    _, plain = fit_tiny(train=tiny_batches([4]), max_epochs=1)
    assert {name: result.metrics[name] for name in plain.metrics if "train" in name} == {
        name: value for name, value in plain.metrics.items() if "train" in name
    }


# -- when things go wrong ---------------------------------------------------------------------------------------------


def test_an_error_in_the_second_pass_restores_the_weights() -> None:
    class Falls(TinyTask):
        calls = 0

        def training_step(self, batch: Any) -> Any:
            self.calls += 1
            if self.calls == 4:
                raise ZeroDivisionError
            return super().training_step(batch)

    fallen, expected = Falls(), TinyTask()
    with pytest.raises(ZeroDivisionError):
        fit_tiny([SAM(0.5)], task=fallen)
    fit_tiny([SAM(0.5)], task=expected, max_epochs=None, max_updates=1)
    for ours, theirs in zip(fallen.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# -- what it refuses --------------------------------------------------------------------------------------------------


def test_an_optimizer_that_runs_the_window_is_refused() -> None:
    class Newton(TinyTask):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(StackError, match="sam cannot train with LBFGS"):
        fit_tiny([SAM()], task=Newton())


def test_a_loss_scaler_beside_it_is_refused_by_name() -> None:
    class Scaler(forge.Plugin):
        provides = ("grad_scaler",)

    with pytest.raises(StackError) as caught:
        fit_tiny([SAM(), Scaler()])
    assert str(caught.value) == (
        "'sam' cannot run together with 'scaler', which brings 'grad_scaler'. Use amp.dtype=bf16, which needs none."
    )
    assert declared(SAM) == ["provides second_pass", "conflicts grad_scaler"]


def test_another_owner_of_the_train_step_is_refused_by_name() -> None:
    class Other(forge.Plugin):
        @forge.hookimpl
        def forge_train_step(self) -> bool:
            return True

    with pytest.raises(StackError, match="'other' and 'sam' both own forge_train_step"):
        fit_tiny([SAM(), Other()])


@pytest.mark.parametrize("rho", [0.0, -1.0, math.inf, math.nan])
def test_a_climb_that_makes_no_sense_is_refused(rho: float) -> None:
    with pytest.raises(RecipeError, match=r"sam\.rho is .*; it must be a number above 0"):
        SAM(rho)


def test_buffers_move_in_the_first_pass_alone() -> None:
    class Counts(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("moved", torch.zeros(8))
            self.register_buffer("replaced", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.moved.mul_(0.9).add_(x.detach().mean(0))
                self.replaced = 0.9 * self.replaced + x.detach().mean(0)
            return super().forward(x)

    plain, climbing = Counts(), Counts()
    torch.manual_seed(0)
    task_fit(plain)
    task_fit(climbing, plugins=[SAM(0.5)])
    assert torch.equal(climbing.moved, plain.moved)
    assert torch.equal(climbing.replaced, plain.replaced)
