"""sam: two passes per update, held against the loop that one writes by hand, bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import forge
from forge.cli.plugin_page import declared
from forge.errors import RecipeError, StackError
from forge.testing import TinyGAN, TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import SAM, Accumulate, Clip, Freeze
from tests.support.profiles import covering, few
from tests.support.tasks import Classifier
from tests.support.tasks import fit as task_fit


class Decayed(TinyTask):
    """With AdamW, whose decay shows who touches weights."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def loss_of(task: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(task(batch[0]), batch[1])


# -- by hand ----------------------------------------------------------------------------------------------------------


def climb(parameters: list[nn.Parameter], rho: float, adaptive: bool) -> None:
    """w + rho * g / |g|, or with T = |w| + 0.01: w + rho * T² g / |T g|."""
    with torch.no_grad():
        sizes = [p.abs() + 0.01 if adaptive else torch.ones_like(p) for p in parameters]
        scaled = [p.grad * size for p, size in zip(parameters, sizes, strict=True) if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in scaled]))
        for parameter, size, gradient in zip(parameters, sizes, scaled, strict=True):
            parameter.add_(gradient * size * (rho / (norm + 1e-12)))


def sam_by_hand(
    task: Any,
    batches: Sequence[Any],
    epochs: int = 2,
    *,
    rho: float = 0.05,
    adaptive: bool = False,
    window: int = 1,
    clip: float | None = None,
    still: bool = True,
    after_update: Callable[[int], None] = lambda update: None,
) -> None:
    """SAM as one writes it by hand: gradient, climb, gradient, back, clip, step."""
    optimizer, update = task.configure_optimizers(), 0
    torch.manual_seed(0)
    task.train()
    for _ in range(epochs):
        for start in range(0, len(batches), window):
            micros = batches[start : start + window]
            sizes = [len(x) for x, _ in micros]

            def run(micros: Any = micros, sizes: list[int] = sizes) -> None:
                optimizer.zero_grad()
                for micro, size in zip(micros, sizes, strict=True):
                    loss = loss_of(task, micro)
                    if len(set(sizes)) > 1:
                        loss = loss * (size / sum(sizes))
                    elif len(sizes) > 1:
                        loss = loss / len(sizes)
                    loss.backward()

            random_numbers = torch.get_rng_state()
            run()
            parameters = [p for p in task.parameters() if p.grad is not None]
            weights = [p.detach().clone() for p in parameters]
            buffers = [b.clone() for b in task.buffers()]
            climb(parameters, rho, adaptive)
            torch.set_rng_state(random_numbers)
            run()
            with torch.no_grad():
                for parameter, weight in zip(parameters, weights, strict=True):
                    parameter.copy_(weight)
                for buffer, before in zip(task.buffers(), buffers, strict=True):
                    buffer.copy_(before if still else buffer)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(task.parameters(), clip)
            optimizer.step()
            update += 1
            after_update(update)


def gan_by_hand(gan: TinyGAN, batches: Sequence[Any], epochs: int, rho: float, window: int, clip: float) -> None:
    """Two optimizers over one window: each climbs with its own parameters, in its own turn."""
    nets: dict[str, nn.Module] = {"generator": gan.generator, "discriminator": gan.discriminator}
    optimizers = gan.configure_optimizers()
    torch.manual_seed(0)
    for _ in range(epochs):
        for start in range(0, len(batches), window):
            micros = batches[start : start + window]
            total = sum(len(x) for x, _ in micros)
            alike = len({len(x) for x, _ in micros}) == 1
            for name, net in nets.items():
                for other in nets.values():
                    other.requires_grad_(other is net)

                def run(name: str = name, micros: Any = micros, total: int = total, alike: bool = alike) -> None:
                    optimizers[name].zero_grad()
                    for micro in micros:
                        loss = gan.training_step(micro, name)["loss"]
                        share = loss / len(micros) if alike and len(micros) > 1 else loss
                        (share if alike else loss * (len(micro[0]) / total)).backward()

                random_numbers = torch.get_rng_state()
                run()
                weights = copy.deepcopy(net.state_dict())
                climb(list(net.parameters()), rho, False)
                torch.set_rng_state(random_numbers)
                run()
                net.load_state_dict(weights)
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizers[name].step()


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
    sam_by_hand(theirs, data, rho=rho, adaptive=adaptive, window=window, clip=clip)
    assert_same(ours, theirs)


@pytest.mark.parametrize("window", [1, 2])
def test_with_two_optimizers_each_climbs_with_its_own_parameters(window: int) -> None:
    ours, theirs = TinyGAN(), TinyGAN()
    fit_tiny([SAM(0.3), Accumulate(window), Clip(0.2)], task=ours)
    gan_by_hand(theirs, tiny_batches(), 2, 0.3, window, 0.2)
    assert_same(ours, theirs)


def test_the_climb_has_length_rho() -> None:
    lengths: list[float] = []

    class Measure(TinyTask):
        def training_step(self, batch: Any) -> Any:
            flat = torch.cat([p.detach().flatten() for p in self.parameters()])
            lengths.append(float((flat - self.start).norm()) if hasattr(self, "start") else 0.0)
            if not hasattr(self, "start"):
                self.start = flat.clone()
            return super().training_step(batch)

    fit_tiny([SAM(0.3)], task=Measure(), max_epochs=None, max_updates=1)
    assert lengths == [0.0, pytest.approx(0.3, rel=1e-5)]


def test_batch_norm_learns_from_the_second_pass_only_if_asked_to() -> None:
    ours, theirs = TinyTask(), TinyTask()
    fit_tiny([SAM(freeze_norm=False)], task=ours)
    sam_by_hand(theirs, tiny_batches(), still=False)
    assert_same(ours, theirs)
    assert int(ours.net[1].num_batches_tracked) == 20  # pyright: ignore
    assert int(fit_tiny([SAM()])[0].net[1].num_batches_tracked) == 10  # pyright: ignore


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


def test_parameters_that_thaw_are_climbed_from_then_on() -> None:
    ours, theirs = Decayed(), Decayed()
    fit_tiny([SAM(0.5), Freeze("net.0", thaw="3 updates")], task=ours)
    first: Any = theirs.net[0]  # pyright: ignore
    first.requires_grad_(False)
    sam_by_hand(theirs, tiny_batches(), rho=0.5, after_update=lambda update: first.requires_grad_(update >= 3))
    assert_same(ours, theirs)


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
