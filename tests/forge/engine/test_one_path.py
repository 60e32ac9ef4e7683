"""One path for a train step: each default is one body, and a change of the model or the task is seen at once, whatever
plugins there are."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.contract.stack import ACTIONS
from forge.engine.default_actions import Core
from forge.testing import TinyTask, tiny_batches

CALLS = {
    "forge_setup_env": 1,
    "forge_build_loader": 2,
    "forge_build_optimizers": 1,
    "forge_plan_step": 1 + 5,
    "forge_train_step": 5,
    "forge_prepare_batch": 5 + 2,
    "forge_micro_step": 5,
    "forge_forward": 5 + 2,
    "forge_backward": 5,
    "forge_optimizer_step": 5,
    "forge_evaluate": 1,
    "forge_export": 1,
}
"""How often a bare run of one epoch of five batches, with two batches to validate on, calls each default."""


def no_plugin() -> list[forge.Plugin]:
    return []


def inert_micro_step() -> list[forge.Plugin]:
    def around(self: Any) -> Any:
        return (yield)

    return [type("Inert", (forge.Plugin,), {"forge_micro_step": forge.hookimpl(wrapper=True)(around)})()]


def observer() -> list[forge.Plugin]:
    @forge.on("step_end")
    def watch(step: forge.Step) -> None: ...

    return [watch]


def calls_seen(stack: Callable[[], list[forge.Plugin]], change: Callable[[forge.Run, list[int]], None]) -> list[int]:
    """Train ten updates, change something after the second, and return the updates that noticed."""
    seen: list[int] = []

    @forge.on("step_end", mutates=True)
    def after_two(step: forge.Step) -> None:
        if step.index == 1:
            change(step.trainer, seen)

    trainer = forge.Trainer(max_updates=10, seed=1, plugins=[*stack(), after_two], run_dir=False)
    trainer.fit(TinyTask(), tiny_batches())
    return seen


def forward_hook(run: forge.Run, seen: list[int]) -> None:
    run.model.register_forward_hook(lambda *_: seen.append(run.progress.update))


def forward_pre_hook(run: forge.Run, seen: list[int]) -> None:
    run.model.register_forward_pre_hook(lambda *_: seen.append(run.progress.update))


def training_step(run: forge.Run, seen: list[int]) -> None:
    run.task.training_step = noting(run, seen, run.task.training_step)


def optimizer_step(run: forge.Run, seen: list[int]) -> None:
    optimizer = run.optimizers[None]
    optimizer.step = noting(run, seen, optimizer.step)


def model(run: forge.Run, seen: list[int]) -> None:
    class Around(type(run.model)):
        def forward(self, *given: Any) -> Any:
            seen.append(run.progress.update)
            return super().forward(*given)

    run.replace_model(Around(run.task))


def noting(run: forge.Run, seen: list[int], given: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(*arguments: Any) -> Any:
        seen.append(run.progress.update)
        return given(*arguments)

    return replaced


@pytest.mark.parametrize("stack", [no_plugin, inert_micro_step, observer])
@pytest.mark.parametrize("change", [forward_hook, forward_pre_hook, training_step, optimizer_step, model])
def test_what_is_hooked_or_replaced_is_called(stack: Any, change: Any) -> None:
    assert calls_seen(stack, change) == list(range(2, 10))


def test_every_default_is_the_one_body_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: Counter[str] = Counter()

    def noting(name: str, given: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(given)
        def note(*args: Any) -> Any:
            called[name] += 1
            return given(*args)

        return note

    for name in ACTIONS:
        monkeypatch.setattr(Core, name, noting(name, getattr(Core, name)))
    trainer = forge.Trainer(max_epochs=1, seed=1, plugins=[], run_dir=tmp_path / "run")
    trainer.fit(TinyTask(), tiny_batches(), tiny_batches((4, 4)))
    assert called == CALLS
    assert called.keys() == set(ACTIONS)
