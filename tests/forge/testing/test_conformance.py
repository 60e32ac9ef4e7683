"""The conformance kit passes what keeps the contract, all built-in plugins first, and catches what breaks it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import forge
from forge import registry
from forge.engine.trainer import Trainer
from forge.testing import check_plugin
from tests.conftest import PROFILE
from tests.support import kernel_kit  # noqa: F401 - mends Triton's interpreter, in which kernels run here
from tests.support.plugin_kit import ACTING, LEFT_OUT, PACKAGES, PLAINEST, TWO
from tests.support.profiles import some


@pytest.fixture(autouse=True)
def small_heap_for_each() -> None:
    """The kit looks for what a run leaves behind: not among all that earlier tests have imported."""
    gc.freeze()


NOT_ALONE = {"expert_parallel", "tensor_parallel", "torchft"}
"""What needs another plugin beside it and a plan or experts in its task, or a server: test_expert_parallel.py,
test_tensor_parallel.py and test_torchft.py have them."""


THOROUGH = {"amp", "ema"}
"""Also checked with two optimizers and with exceptions in the quick profile, which has one optimizer for the others."""


QUICK = {"checkpoint", "clip", "guard", "jsonl", "remat"}
"""The quick profile has these too, one of a kind: the full one has every plugin."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in THOROUGH | QUICK))
        for name in sorted(registry.installed("plugin").keys() - NOT_ALONE)
    ],
)
def test_every_installed_plugin_keeps_the_contract(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    leave_out: list[str] = []
    if (
        PROFILE == "quick"
    ):  # that the order of a stack makes no difference is a law of tests/forge/engine/test_composition.py
        leave_out = [*LEFT_OUT, "order"] if name in THOROUGH else [*PLAINEST, "order", "exceptions", "graphs"]
        leave_out.append("purity")  # tests/forge/testing/test_purity.py has it
    check_plugin(lambda: registry.load("plugin", name)(**ACTING.get(name, {})), leave_out=leave_out)


# ---------------------------------------------------------------------------------------------------------------------
# Good plugins pass


class Shrink(forge.Plugin):
    """Scale every gradient down, more with every update."""

    before = ("clip",)

    @dataclass(kw_only=True, slots=True)
    class Config:
        rate: float = 0.1
        "How much of the gradient is taken away by each update."

    config: Config

    @forge.hookimpl
    def forge_start(self) -> None:
        self.scale = 1.0

    @forge.hookimpl
    def forge_edit_grads(self, step: forge.Step) -> None:
        self.scale *= 1 - self.config.rate
        for parameter in step.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.scale)

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


@pytest.mark.slow
def test_what_a_plugin_requires_can_stand_beside_it() -> None:
    class Needy(forge.Plugin):
        """Does nothing without shrink."""

        requires = ("shrink",)

    with pytest.raises(AssertionError, match="'needy' requires 'shrink'"):
        check_plugin(Needy)
    check_plugin(Needy, beside=lambda: [Shrink()], leave_out=[*PLAINEST, "order", "exceptions"])


def test_a_situation_that_a_plugin_refuses_can_be_left_out() -> None:
    class OnlyOne(forge.Plugin):
        """Works with a single optimizer."""

        @forge.hookimpl
        def forge_start(self, trainer: Trainer) -> None:
            if trainer.verb == "fit" and len(trainer.optimizers) > 1:
                raise forge.StackError("only_one works with one optimizer.")

    others = ["leaks", "files", "graphs", "exceptions", "order", "a fit with accumulation"]
    with pytest.raises(AssertionError, match="two optimizers: StackError: only_one works with one optimizer"):
        check_plugin(OnlyOne, leave_out=others)
    check_plugin(OnlyOne, leave_out=[*others, TWO, f"{TWO} and accumulation"])


# ---------------------------------------------------------------------------------------------------------------------
# Broken ones are caught, by name


class Undocumented(forge.Plugin):
    """An option without a description."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        rate: float = 0.1

    config: Config


class Silent(forge.Plugin):
    pass


class OneOptimizer(forge.Plugin):
    """Forgets that there may be several optimizers."""

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        assert step.optimizer is not None


class NeedsOptimizers(forge.Plugin):
    """Forgets that validation has no optimizers."""

    @forge.hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        self.count = len(trainer.optimizers)


class Censor(forge.Plugin):
    """Claims to watch, but changes what others log."""

    observer = True

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self) -> Any:
        metrics = yield
        return dict.fromkeys(metrics, 0.0) if isinstance(metrics, dict) else metrics


class Forgetful(forge.Plugin):
    """Gives its state away and does not take it back."""

    @forge.hookimpl
    def forge_start(self) -> None:
        self.seen = 0

    @forge.hookimpl
    def forge_step_end(self) -> None:
        self.seen += 1

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None: ...


class OneWay(forge.Plugin):
    """Gives its state away and has no way to take it back."""

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return {}


class Hoarder(forge.Plugin):
    """Keeps every gradient that it ever saw."""

    kept: ClassVar[list[Any]] = []

    @forge.hookimpl
    def forge_inspect_grads(self, step: forge.Step) -> None:
        self.kept += [parameter.grad for parameter in step.parameters()]


class Clinger(forge.Plugin):
    """Keeps the task where nobody forgets it."""

    tasks: ClassVar[list[Any]] = []

    @forge.hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        self.tasks[:] = [trainer.task]


@pytest.mark.parametrize(
    ("broken", "complaint"),
    some(
        [
            (Undocumented, "Undocumented.Config does not describe rate"),
            (Silent, "Silent has no docstring"),
            (OneOptimizer, "'one_optimizer' does not survive a fit with two optimizers"),
            (NeedsOptimizers, "'needs_optimizers' does not survive trainer.validate()"),
            (
                Censor,
                "'censor' declares observer = True, but a fit goes differently with it: at update 5, in the metrics",
            ),
            (
                Forgetful,
                "'forgetful' that is resumed at update 4 has other metrics or another state: at update 5, in the "
                "plugin's state (seen)",
            ),
            (OneWay, "'one_way' defines only forge_state_dict"),
            (Hoarder, "'hoarder' leaves 42 tensors behind after a fit"),
            (Clinger, "'clinger' keeps the task alive"),
        ],
        quick=4,
    ),
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_broken_plugin_is_caught_and_told_what_is_wrong(broken: Callable[[], forge.Plugin], complaint: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_plugin(broken, leave_out=LEFT_OUT if broken is OneOptimizer else PLAINEST)
    assert complaint in str(caught.value)


def test_make_must_make_a_new_plugin_each_time() -> None:
    one = Shrink()
    with pytest.raises(AssertionError, match="returned one object twice"):
        check_plugin(lambda: one)


def test_a_plugin_can_be_handed_over_as_it_is() -> None:
    @forge.on("step_end", every="2 updates")
    def meddle(step: forge.Step) -> None:
        """Claims to watch."""
        with torch.no_grad():
            step.parameters()[0].mul_(2)

    with pytest.raises(AssertionError, match="'meddle' declares observer = True"):
        check_plugin(meddle)


def test_hooks_on_all_modules_that_others_left_are_not_its_own() -> None:
    others = ["runs", "files", "graphs", "exceptions", "order"]
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: None)
    try:
        check_plugin(Shrink, leave_out=others)
    finally:
        handle.remove()
