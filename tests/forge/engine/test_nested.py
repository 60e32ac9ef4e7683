"""A run inside a run leaves the outer one as it was; runs in several threads are told at their start."""

from __future__ import annotations

import logging
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import forge
import forge.errors
from forge.data import Loader
from forge.testing import TinyTask, tiny_batches
from tests.support.patience import PATIENCE
from tests.support.profiles import some

OPTIONS: dict[str, Any] = {"device": "cpu", "run_dir": False}


class Draws(TinyTask):
    """Draws in every step, from every generator."""

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        metrics = super().training_step(batch)
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return {**metrics, "loss": metrics["loss"] * (1 + 0.1 * noise)}


def nested_fit() -> None:
    trainer = forge.Trainer(plugins=[], max_updates=3, seed=5, **OPTIONS)
    trainer.fit(Draws(seed=1), tiny_batches(), tiny_batches(seed=1))


def nested_without_a_seed() -> None:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    task = Draws(seed=1)
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])
    forge.Trainer(plugins=[], max_updates=3, seed=None, **OPTIONS).fit(task, tiny_batches())


def nested_validation() -> None:
    forge.Trainer(plugins=[], seed=9, **OPTIONS).validate(Draws(), tiny_batches())


def nested_that_fails() -> None:
    @forge.on("step_end")
    def fails(step: forge.Step) -> None:
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        forge.Trainer(plugins=[fails], max_updates=2, seed=8, **OPTIONS).fit(Draws(), tiny_batches())


def nothing() -> None:
    pass


def settings() -> list[Any]:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    flags = [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.is_grad_enabled()]
    return [*handlers, *flags, torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed()]


def outer(inside: Callable[[], None], hook: str, seed: int | None = 0) -> list[Any]:
    """A run with another one inside it: weights, metrics and numbers that it draws next."""
    forge.seed(11)
    changed: list[Any] = []

    def look(*_: Any) -> None:
        before = settings()
        inside()
        changed.extend(now for then, now in zip(before, settings(), strict=True) if then != now)

    class Validates(Draws):
        evaluation = "no_grad"

        def validation_step(self, batch: Any) -> Any:
            look()
            return {**super().validation_step(batch), "noise": torch.rand(())}

    plugins = [] if hook == "validation" else [forge.on(hook)(lambda step: look())]
    task = Validates(seed=0) if hook == "validation" else Draws(seed=0)
    trainer = forge.Trainer(
        plugins=plugins, max_updates=4, seed=seed, log_every=1, validate_every="2 updates", **OPTIONS
    )
    data = Loader([(x, y) for batch in tiny_batches() for x, y in zip(*batch, strict=True)], 4, shuffle=True)
    result = trainer.fit(task, data, tiny_batches(seed=2))
    assert changed == []
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return [*(value.tolist() for value in task.state_dict().values()), sorted(result.metrics.items()), drawn]


INSIDE = [
    nested_fit,
    nested_without_a_seed,
    nested_validation,
    nested_that_fails,
]


@pytest.mark.parametrize("hook", ["step_end", "validation"])
@pytest.mark.parametrize("inside", some(INSIDE, quick=1))
def test_a_run_inside_a_run_leaves_it_as_it_was(inside: Callable[[], None], hook: str) -> None:
    assert outer(inside, hook) == outer(nothing, hook)


def test_a_fit_inside_an_evaluation_trains_what_was_made_before() -> None:
    task, data = Draws(seed=1), tiny_batches()

    class Validates(TinyTask):
        def validation_step(self, batch: Any) -> Any:
            assert torch.is_inference_mode_enabled()
            forge.Trainer(plugins=[], max_updates=3, seed=5, **OPTIONS).fit(task, data)
            assert torch.is_inference_mode_enabled()
            with pytest.raises(forge.errors.TaskError, match=r"cannot be trained.*evaluation = 'no_grad'"):
                nested_fit()
            return super().validation_step(batch)

    alone = Draws(seed=1)
    forge.Trainer(plugins=[], max_updates=3, seed=5, **OPTIONS).fit(alone, data)
    trainer = forge.Trainer(plugins=[], max_updates=1, seed=0, validate_every="1 update", **OPTIONS)
    trainer.fit(Validates(), data, data[:1])
    assert all(map(torch.equal, task.state_dict().values(), alone.state_dict().values()))


def test_a_trainer_made_earlier_gives_back_the_numbers_of_its_own_moment() -> None:
    made: list[forge.Trainer] = []

    def late() -> None:
        """Make a Trainer in the first update, without a seed, and use it in the third."""
        if not made:
            made.append(forge.Trainer(plugins=[], max_updates=1, seed=None, **OPTIONS))
        made.append(made[0])
        if len(made) == 4:
            made[0].fit(quiet(), tiny_batches())

    def quiet() -> Draws:
        state = torch.get_rng_state()
        task = Draws(seed=1)
        torch.set_rng_state(state)
        return task

    assert outer(late, "step_end") == outer(nothing, "step_end")


def test_the_seed_still_makes_the_inner_run_repeatable() -> None:
    found: list[Any] = []

    def keep() -> None:
        task = Draws(seed=1)
        forge.Trainer(plugins=[], max_updates=3, seed=5, **OPTIONS).fit(task, tiny_batches())
        found.append([value.tolist() for value in task.state_dict().values()])

    keep()
    outer(keep, "step_end")
    assert len(found) == 5
    assert all(each == found[0] for each in found)


# -- threads ----------------------------------------------------------------------------------------------------------


def fit_beside(inner: Callable[[], Any]) -> None:
    """Begin a run in another thread while one runs in this."""

    @forge.on("step_end")
    def beside(step: forge.Step) -> None:
        if step.index == 0:
            thread = threading.Thread(target=inner, name="other")
            thread.start()
            thread.join()

    trainer = forge.Trainer(plugins=[beside], max_updates=2, seed=0, validate_every="1 epoch", **OPTIONS)
    trainer.fit(TinyTask(), tiny_batches()[:2], tiny_batches())


def test_a_fit_in_another_thread_is_told_at_its_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "forge"):
        fit_beside(nested_fit)
    told = [record.getMessage() for record in caplog.records if "threads share the global generators" in record.message]
    assert len(told) == 1
    assert told[0].startswith("This fit begins in other while fit runs in MainThread")
    assert "process of its own" in told[0]


def test_the_draws_of_another_thread_are_not_blamed_on_a_validation(caplog: pytest.LogCaptureFixture) -> None:
    go, done = threading.Event(), threading.Event()

    class Waits(TinyTask):
        def validation_step(self, batch: Any) -> Any:
            go.set()
            assert done.wait(PATIENCE)
            return super().validation_step(batch)

    @forge.on("step_end")
    def draws(step: forge.Step) -> None:
        if step.index == 1:
            assert go.wait(PATIENCE)
            torch.rand(3)
        if step.index == 2:
            done.set()

    def other() -> None:
        trainer = forge.Trainer(plugins=[draws], max_updates=4, seed=0, **OPTIONS)
        trainer.fit(TinyTask(), tiny_batches())

    with caplog.at_level(logging.WARNING, "forge"):
        thread = threading.Thread(target=other, name="other")
        thread.start()
        trainer = forge.Trainer(plugins=[], max_updates=1, seed=0, validate_every="1 update", **OPTIONS)
        trainer.fit(Waits(), tiny_batches(), tiny_batches()[:1])
        thread.join()
    said = [record.getMessage() for record in caplog.records]
    assert any("threads share the global generators" in each for each in said)
    assert not any("batch drew random numbers" in each for each in said)
