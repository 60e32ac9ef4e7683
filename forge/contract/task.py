"""TaskModule: what a user subclasses. A torch module that knows its loss, its metrics and its optimizers.

A step is pure: it returns its loss and metrics, and forge does the rest (zero, backward, step, logging, modes).
"""

from __future__ import annotations

import logging
from abc import ABCMeta
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from forge import registry
from forge.contract.frozen import move_frozen
from forge.contract.protocols import Averages
from forge.data.accumulation_windows import batch_size
from forge.errors import TaskError
from forge.metrics.means import scalars_of
from forge.options import bound_arguments, saved_arguments
from forge.rng import DrawnWeights, RNGState, nobody_has_seeded

if TYPE_CHECKING:
    from forge.contract.run import Run

logger = logging.getLogger("forge")

STAGE_METHODS = {
    "train": "training_step",
    "val": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
COLLECT = "collect"
"""The stage in which a live loader makes data with the task: no method of it, but any function of it."""


Made = TypeVar("Made")
Part = TypeVar("Part", bound=nn.Module)


class _TaskMeta(ABCMeta):
    """Sees a task being made: refuses a forgotten `super().__init__()`, keeps the arguments, and notes whether random
    numbers were drawn before any seed was set."""

    def __call__(cls: type[Made], *args: Any, **kwargs: Any) -> Made:
        drawn = DrawnWeights() if nobody_has_seeded() else None
        try:
            task = super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        except AttributeError as error:
            if "Module.__init__() call" in str(error):  # torch: "cannot assign module before Module.__init__() call"
                raise _forgotten_init(cls) from error
            add_hint(error)
            raise
        if "_parameters" not in task.__dict__:
            raise _forgotten_init(cls)
        task.init_args = bound_arguments(cls, args, kwargs)
        if drawn is not None:
            drawn.note(task)
        return task


class TaskModule(nn.Module, metaclass=_TaskMeta):
    """Subclass this: write `training_step` and `configure_optimizers`, and whatever else the run needs."""

    evaluation: ClassVar[Literal["inference", "no_grad", "grad"]] = "inference"
    """How evaluation treats gradients: `inference_mode()`, `no_grad()`, or with gradients on ("grad")."""
    check_first_batch: ClassVar[bool] = True
    """Look at the first batch's loss and labels for the classic mistakes, and refuse them by name."""
    expected: ClassVar[set[str] | frozenset[str]] = frozenset()
    """Names of findings that are meant: `forge doctor` and a fit keep quiet about them."""
    init_args: dict[str, Any]
    """The arguments this task was made with."""
    trainer: Run | None = None
    """The Trainer that runs this task, while one does."""
    __jit_ignored_attributes__ = ("init_args", "trainer")
    __jit_unused_properties__ = ("is_padding",)

    def __init__(self) -> None:
        super().__init__()

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle of a task takes no running Trainer with it."""
        return {**super().__getstate__(), "trainer": None}

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        move_frozen(self, fn)
        return self

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, /, *, weights: str | None = None, strict: bool = True, **overrides: Any
    ) -> Self:
        """Make a task again as it was saved, with its weights, on the CPU and in training mode.

        `path` is a run folder, a checkpoint, a weights file, or a file of torch.save's, as for `forge.load_weights`.
        `weights` takes the average of the plugin of that name, or "raw", what was trained; without it a finished
        run gives what it exported (an average, where one was evaluated) and a checkpoint what was trained.
        The arguments of `__init__` that are plain data were saved with the weights; others must be given again, by
        name, and `overrides` win over what was saved. `strict=False` loads what fits and logs the rest. The random
        numbers of the caller are left as they were.
        """
        from forge.checkpoint.weights import fill, read_weights

        if cls is TaskModule:
            raise TaskError("TaskModule.from_checkpoint makes no task: call it on the class that was saved.")
        found = read_weights(path, weights)
        saved = found.task or {"class": cls.__name__, "options": {}}
        args, kwargs = saved_arguments(cls, saved, overrides, found.path)
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        rng = RNGState.capture(device)
        try:
            with torch.device("cpu"):
                task = cls(*args, **kwargs)
        finally:
            rng.restore(device)
        try:
            fill(task, found, strict=strict)
        except TaskError as error:
            if saved["class"] != cls.__name__:
                raise TaskError(f"{error} It was saved by the task {saved['class']}.") from error
            raise
        return task

    def training_step(self, batch: Any) -> Any:
        """Return the loss, or `{"loss": loss, **metrics}`; metrics are scalars, detached for you.

        With a dict of optimizers the signature is `training_step(self, batch, name)`.
        """
        raise TaskError(f"{type(self).__name__} defines no training_step(self, batch); fit needs one.")

    def validation_step(self, batch: Any) -> Any:
        """Return a loss, or a dict of scalar metrics; they are averaged over the loader, weighted by `num_items`."""
        raise TaskError(
            f"{type(self).__name__} defines no validation_step(self, batch); validation needs one. "
            "`validation_step = training_step` is often enough."
        )

    def test_step(self, batch: Any) -> Any:
        """As validation_step, for the test stage; that is its default."""
        return self.validation_step(batch)

    def predict_step(self, batch: Any) -> Any:
        """Return the outputs for a batch. Default: `self(batch)`, without the labels of an (inputs, labels) pair."""
        return self(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def configure_optimizers(self) -> Any:
        """Return an optimizer, `(optimizer, schedule)`, `(optimizer, schedule, "1 epoch")`, or a dict of those by name.

        A schedule steps once per update, or per the interval given. A ReduceLROnPlateau steps after each validation;
        its third element is the metric to watch ("val/loss" if left out).
        """
        raise TaskError(f"{type(self).__name__} defines no configure_optimizers(self); fit needs one.")

    def takes_turn(self, name: str, update: int) -> bool:
        """With several optimizers: whether `name` trains in this update (for 5 : 1 schedules and the like)."""
        return True

    def num_items(self, batch: Any) -> int | Tensor:
        """What a micro-batch weighs in its window and in metric means; asked on the raw batch.

        Default: the number of samples; 1, and a note, where a batch holds nothing that tells it. A language model
        returns its number of target tokens.
        """
        size = batch_size(batch)
        if size is None and self.trainer is not None and "num_items" not in self.trainer.said:
            self.trainer.said.add("num_items")
            logger.warning(
                "Note: cannot tell how many samples a %s batch holds: it has no tensor with a first dimension. Every "
                "batch counts as one. Define num_items(self, batch) on %s if they are of different sizes.",
                type(batch).__name__,
                type(self).__name__,
            )
        return 1 if size is None else size

    @property
    def is_padding(self) -> bool:
        """In an evaluation step: whether this is a padding batch. It belongs to another rank and runs here because all
        ranks must run the same number of batches.
        forge does not count it. A task that collects something of every batch skips it:
        `if not self.is_padding: self.seen.append(...)`.
        """
        step = self.trainer.eval_step if self.trainer is not None else None
        return step is not None and step.is_padding

    def averaged(self, part: Part, plugin: str | None = None) -> Part:
        """Return a part of this task with its averaged weights: a target network, a mean teacher.

        ::

            target = self.averaged(self.net)(views)

        A plugin that averages weights keeps the average, and saves it; `plugin` names it where there are several. What
        is returned takes no gradient and is in the modes of `part`. Outside a fit there is no average: it is `part`.
        """
        run = self.trainer
        if run is None or run.verb != "fit":
            return part
        for keeper in run.stack:
            if isinstance(keeper, Averages) and plugin in (None, keeper.name):
                return keeper.averaged(self, part)
        raise TaskError(
            f"{type(self).__name__} asks for averaged weights, and no plugin of this run "
            f"{'averages them' if plugin is None else f'is called {plugin!r} and averages them'}."
            f"{registry.advice('average', ' Train with {}.')}"
        )

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        """Called after the last batch of an evaluation: return more scalars to log, or something to look at
        (`forge.Image`, `forge.Text`, `forge.Histogram`, `forge.Embedding`).
        On several ranks it is called on each; what a rank kept is its share. Rank 0's numbers count.
        """
        return {}


def defines(task: TaskModule, method: str) -> bool:
    """Whether the task, rather than the base class, defines a method."""
    return getattr(type(task), method) is not getattr(TaskModule, method) or method in vars(task)


def add_hint(error: BaseException) -> None:
    """Add what packages know about an attribute that a task lacks, as those that Lightning's modules have."""
    name = error.name if isinstance(error, AttributeError) and isinstance(error.obj, TaskModule) else None
    if name and (answer := registry.hint("task", name)):
        error.add_note(f"forge: A TaskModule has no self.{name}: {answer}")


def _forgotten_init(cls: type) -> TaskError:
    return TaskError(
        f"{cls.__name__}.__init__ does not call super().__init__(). Make it the first line of __init__: without it "
        "no layer is registered."
    )


PHASES = ("surgery", "shard", "remat", "compile", "parallel")
"""The phases of `forge_build_model`, in order."""


class TaskCall(nn.Module):
    """`model(batch, stage, name=None)` calls the task's method for that stage: what DDP, FSDP and compile wrap."""

    def __init__(self, task: TaskModule):
        super().__init__()
        self.task = task

    def forward(self, batch: Any, stage: str, name: str | None = None) -> Any:
        if stage == COLLECT:
            return batch(self.task)
        more = (name,) if stage == "train" and name is not None else ()
        output = getattr(self.task, STAGE_METHODS[stage])(batch, *more)
        return output if type(output) is Tensor or stage == "predict" else scalars_of(output)


@dataclass(slots=True)
class Build:
    """What `forge_build_model` works on: change `task` in place, or replace `model`."""

    task: TaskModule
    model: nn.Module
