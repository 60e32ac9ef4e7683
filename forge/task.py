"""TaskModule: what a user subclasses. A torch module that knows its loss, its metrics and its optimizers.

::

    class Classifier(forge.TaskModule):
        def __init__(self, hidden: int = 256, lr: float = 1e-3):
            super().__init__()
            self.lr = lr
            self.net = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch):
            x, y = batch
            logits = self(x)
            return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

        validation_step = training_step

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=self.lr)

A step is pure: it returns its loss and metrics, and forge does the rest (zero, backward, step, logging, modes).
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from torch import Tensor, nn

from forge.data.feed import batch_size
from forge.errors import DataError, TaskError

if TYPE_CHECKING:
    from forge.trainer import Trainer

STAGE_METHODS = {
    "train": "training_step",
    "val": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


Made = TypeVar("Made")


class _TaskMeta(ABCMeta):
    """Sees a task being made: refuses a forgotten `super().__init__()` and keeps the arguments."""

    def __call__(cls: type[Made], *args: Any, **kwargs: Any) -> Made:
        try:
            task = super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        except AttributeError as error:
            if "Module.__init__() call" in str(error):  # torch: "cannot assign module before Module.__init__() call"
                raise _forgotten_init(cls) from error
            raise
        if "_parameters" not in task.__dict__:
            raise _forgotten_init(cls)
        task.init_args = _bound(cls, args, kwargs)
        return task


class TaskModule(nn.Module, metaclass=_TaskMeta):
    """Subclass this: write `training_step` and `configure_optimizers`, and whatever else the run needs."""

    evaluation: ClassVar[Literal["inference", "no_grad", "grad"]] = "inference"
    """How evaluation treats gradients: `inference_mode()`, `no_grad()`, or with gradients on ("grad")."""
    check_first_batch: ClassVar[bool] = True
    """Look at the first batch's loss and labels for the classic mistakes, and refuse them by name."""

    init_args: dict[str, Any]
    """The arguments this task was made with."""
    trainer: Trainer | None = None
    """The Trainer that runs this task, while one does."""

    def __init__(self) -> None:
        super().__init__()

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle of a task takes no running Trainer with it."""
        return {**self.__dict__, "trainer": None}

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

        Default: the number of samples. A language model returns its number of target tokens.
        """
        size = batch_size(batch)
        if size is None:
            raise DataError(
                f"Cannot tell how many samples a {type(batch).__name__} batch holds: it has no tensor with a first "
                f"dimension. Define num_items(self, batch) on {type(self).__name__}."
            )
        return size

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        """Called after the last batch of an evaluation: return more scalars, `forge.Image`s or `forge.Text`s to log."""
        return {}


def defines(task: TaskModule, method: str) -> bool:
    """Whether the task, rather than the base class, defines a method."""
    return getattr(type(task), method) is not getattr(TaskModule, method) or method in vars(task)


def _forgotten_init(cls: type) -> TaskError:
    return TaskError(
        f"{cls.__name__}.__init__ does not call super().__init__(). Make it the first line of __init__: without it "
        "no layer is registered."
    )


def _bound(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(list(bound.arguments.items())[1:])  # without self
    for parameter in inspect.signature(cls.__init__).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    return arguments
