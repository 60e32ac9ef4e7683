"""A validation before training: all of it, or a first batch to find a mistake."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.nn.parameter import is_lazy

import forge
from forge.data.accumulation_windows import is_stateful
from forge.data.limited import Limited
from forge.data.own_generators import data_roots
from forge.data.workers import end_workers
from forge.engine.evaluation import substituted
from forge.errors import RecipeError, StackError
from forge.snapshot.sandbox import without_side_effects
from forge.util.walk import walk

logger = logging.getLogger("forge")

NOTE = "forge: this was the check before training, on {} of each val loader: no update was made (docs/plugins/{}.md)."


class ValidateFirst(forge.Plugin):
    """Validate before the first update: on one batch, to find a mistake now rather than after an epoch; or on all.

    The recipe `default` has it with `batches: 1`: one batch of each val loader runs before the first update, so a
    mistake in `validation_step` costs no epoch. The run goes on as if it had not been: the generators of the run, the
    task and the data, the buffers, the metrics, the position of the loaders and what counts batches are put back, and
    nothing is logged. `evaluation_end` is called with that batch, so that lists and meters of yours are emptied as
    after any validation; an error in it is only a warning, since it may need more than one batch. What your code
    writes to files, and a list that `evaluation_end` does not empty, keep the batch. An iterator, which cannot be read
    twice, is not read; nor is anything where a fit does not validate. Turn it off with
    `Trainer(validate_first=False)`, `trainer.validate_first=false`, or `-p no:validate_first`.

    `Trainer(validate_first=True)` validates on everything instead: the metrics of the weights that training starts
    from, at update 0 of every log. It runs whatever `validate_every` says, and takes no random numbers from the run:
    the trained weights are the same with and without it. Use it to fine-tune, where the start is a result to beat.

    A resumed run does not validate again.

    Together with: `early_stop` and `checkpoint.best` do not compare it.

    ::

        forge fit quickstart trainer.validate_first=true
        forge fit quickstart trainer.validate_first=false
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        batches: int | None = None
        "Batches of each val loader to try, without a trace; null: validate on all, and log it."

    config: Config
    provides = ("validate_first",)
    observer = True
    effects = ("evaluates",)

    def __init__(self, **values: Any):
        super().__init__(**values)
        if self.config.batches is not None and self.config.batches < 1:
            raise RecipeError(f"validate_first.batches is {self.config.batches}; it must be at least 1.")

    @classmethod
    def for_setting(cls, setting: str, value: Any) -> dict[str, Any]:
        return {"batches": None}

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._due = trainer.verb == "fit"
        if self.config.batches is not None:
            self._due = self._due and trainer.validate_every is not None and "val" in trainer.loaders
        elif self._due and "val" not in trainer.loaders:
            raise StackError("validate_first is set, but this fit has no val loader. Pass one, or leave it out.")
        if not self._due:
            trainer.switch_hooks(self, "forge_train_step", on=False)

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        if self._due:
            self._due = False
            trainer = step.trainer
            if step.index == 0 and self.config.batches is None:
                trainer.log_metrics(0, trainer.hooks.forge_evaluate(trainer, "val"))
            elif step.index == 0 and not any(map(is_lazy, trainer.task.parameters())):
                self._try(trainer, self.config.batches or 1)
            trainer.switch_hooks(self, "forge_train_step", on=False)
        return (yield)

    def _try(self, trainer: forge.Run, batches: int) -> None:
        """Validate on first batches; afterwards nothing of it is left."""
        own = trainer.loaders["val"]
        tried = {n: First(loader, batches) for n, loader in own.items() if not isinstance(_given(loader), Iterator)}
        if not tried:
            return
        with left_as_it_is(trainer, own), substituted(trainer, "val", tried):
            try:
                trainer.hooks.forge_evaluate(trainer, "val")
            except Exception as error:
                many = "one batch" if batches == 1 else f"{batches} batches"
                if not all(loader.ended for loader in tried.values()):
                    error.add_note(NOTE.format(many, self.name))
                    raise
                text = "The check before training, a validation on %s, failed after its batches: %s: %s. If it does "
                text += "not only need more of them, the first validation will fail too."
                logger.warning(text, many, type(error).__name__, error)

    def due(self, step: forge.Step) -> bool:
        return step.index == 0


class First(Limited):
    """The first batches of a loader, and whether they were all given."""

    ended = False

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.ended = True


@contextmanager
def left_as_it_is(trainer: forge.Run, loaders: dict[Any, Any]) -> Iterator[None]:
    """Put back what an evaluation changes: generators, buffers, metrics, positions of loaders."""
    task = trainer.task
    states = [(loader, loader.state_dict()) for loader in loaders.values() if is_stateful(loader)]
    roots = {f"val {name}": each for name, each in _by_name(trainer.given_loaders["val"]).items()}
    for name, loader in loaders.items():
        roots |= data_roots(loader, f"val/{name}")
    if task.evaluation == "inference":  # what a first forward keeps must be of use in training
        vars(task)["evaluation"] = "no_grad"
    try:
        with without_side_effects(trainer, roots), kept_values(roots):
            yield
    finally:
        if task.evaluation == "no_grad":
            vars(task).pop("evaluation", None)
        for loader in loaders.values():
            end_workers(loader)
        for loader, state in states:
            loader.load_state_dict(state)


@contextmanager
def kept_values(roots: Mapping[str, Any]) -> Iterator[None]:
    """Restore the plain values that objects keep in attributes, such as an epoch that a sampler counts."""
    found = [own for _, value in walk(roots) if isinstance(own := getattr(value, "__dict__", None), dict)]
    before = [(own, {name: v for name, v in own.items() if type(v) in (bool, int, float, str)}) for own in found]
    try:
        yield
    finally:
        for own, values in before:
            own.update(values)


def _given(loader: Any) -> Any:
    """The user's loader inside forge's own."""
    while type(loader).__module__.startswith("forge.data.") and hasattr(loader, "loader"):
        loader = loader.loader
    return loader


def _by_name(given: Any) -> dict[Any, Any]:
    return given if isinstance(given, dict) else {"loader": given}
