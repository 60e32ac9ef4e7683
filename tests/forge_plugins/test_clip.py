"""clip: torch's own clipping, once per update, of the right parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import forge
from forge.errors import RecipeError
from forge.testing import TinyGAN, assert_same, tiny_batches
from forge_plugins import Accumulate, Clip
from tests.support import reference
from tests.support.averages import loss_of
from tests.support.tasks import Classifier, fit, make_batches


def gradient_norms(plugins: list[forge.Plugin], task: Any = None, norm: float = 2.0, **options: Any) -> list[float]:
    """The gradient norm of every update, as the optimizer sees it."""
    norms: list[float] = []

    class Watch(forge.Plugin):
        @forge.hookimpl(wrapper=True)
        def forge_optimizer_step(self, step: forge.Step) -> Any:
            flat = torch.cat([p.grad.flatten() for p in step.parameters() if p.grad is not None])
            norms.append(float(flat.norm(norm)))
            return (yield)

    fit(task, plugins=[*plugins, Watch()], **options)
    return norms


@pytest.mark.parametrize(
    ("plugin", "by_hand"),
    [
        (Clip(0.1), {"clip_norm": 0.1}),
        (Clip(max_norm=None, max_value=0.01), {"clip_value": 0.01}),
        (Clip(max_norm=0.1, max_value=0.02), {"clip_norm": 0.1, "clip_value": 0.02}),
    ],
    ids=["norm", "value", "both"],
)
@pytest.mark.parametrize("window", [1, 2])
def test_clipping_equals_a_hand_written_loop_bit_for_bit(plugin: Clip, by_hand: dict[str, float], window: int) -> None:
    data, ours = make_batches(5), Classifier(lr=1.0)
    theirs = copy.deepcopy(ours)
    fit(ours, train=data, max_epochs=2, plugins=[plugin, Accumulate(window)])
    reference.train(theirs, loss_of, theirs.configure_optimizers(), data, 2, window=window, **by_hand)  # pyright: ignore
    assert_same(ours, theirs)


def test_a_gradient_below_the_limit_is_left_alone() -> None:
    data, plain = make_batches(5), Classifier()
    clipped = copy.deepcopy(plain)
    fit(plain, train=data)
    fit(clipped, train=data, plugins=[Clip(1e6)])
    assert_same(clipped, plain)


def test_the_largest_entry_can_be_the_norm() -> None:
    norms = gradient_norms([Clip(0.01, norm_type=float("inf"))], norm=float("inf"))
    assert norms == pytest.approx([0.01] * len(norms), rel=1e-3)


def test_the_norm_before_and_after_is_logged_as_its_mean() -> None:
    torch.manual_seed(0)
    task = Classifier()
    untouched = gradient_norms([], copy.deepcopy(task), train=make_batches(1))
    metrics = fit(task, train=make_batches(1), plugins=[Clip(0.1)]).metrics
    assert metrics["grad_norm/before"] == pytest.approx(untouched[0])
    assert metrics["grad_norm/after"] == pytest.approx(0.1)


def test_the_norm_after_counts_the_clipping_by_value_too() -> None:
    torch.manual_seed(0)
    task, plugin = Classifier(), Clip(max_norm=0.5, max_value=0.01)
    seen = gradient_norms([copy.copy(plugin)], copy.deepcopy(task), train=make_batches(1))
    metrics = fit(task, train=make_batches(1), plugins=[plugin]).metrics
    assert metrics["grad_norm/after"] == pytest.approx(seen[0])


def test_each_optimizer_is_clipped_and_logged_on_its_own() -> None:
    norms: dict[str | None, float] = {}

    class Watch(forge.Plugin):
        @forge.hookimpl(wrapper=True)
        def forge_optimizer_step(self, step: forge.Step) -> Any:
            grads = [p.grad.flatten() for p in step.parameters() if p.grad is not None]
            norms[step.name] = float(torch.cat(grads).norm())
            return (yield)

    metrics = fit(TinyGAN(), train=tiny_batches()[:1], plugins=[Clip(1e-3), Watch()]).metrics
    assert norms == {"generator": pytest.approx(1e-3, rel=1e-2), "discriminator": pytest.approx(1e-3, rel=1e-2)}
    for name in norms:
        assert metrics[f"grad_norm/{name}/before"] > metrics[f"grad_norm/{name}/after"] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 0.0}, "clip.max_norm is 0; it must be above 0, or null for no limit."),
        ({"max_value": -1.0}, "clip.max_value is -1; it must be above 0, or null for no limit."),
        ({"max_norm": None}, "clip has neither max_norm nor max_value, so it clips nothing. Set one of them."),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        Clip(**options)
    assert str(refused.value) == message
