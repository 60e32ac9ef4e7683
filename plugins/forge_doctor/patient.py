"""Patient: a task, its data and its plan as a fit would use them; probes work on copies and leave no trace."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forge.contract.requests import SIGNAL
from forge.contract.run import Run
from forge.contract.task import TaskModule, defines
from forge.data.accumulation_windows import batch_size
from forge.data.combined import Combined
from forge.errors import TaskError
from forge.rng import RNGState, reseed
from forge.torch_internals import pytree
from forge_doctor.deadline import Deadline
from forge_doctor.watch import ActivationWatch, StepWatch, first_input, gradient_sizes

SEED = 20
"""With which each step of a probe begins, so that two of them draw the same numbers."""


MANY = 10_000
"""Entries from which a list of a task is data, not what a step collects."""
FEWEST = 8
"""Samples of a batch that experiments need."""


class NotApplicable(Exception):
    """Raised by a probe of something that the planned run does not have."""


class OutOfTime(Exception):
    """Raised in a step of a probe that has had its time."""


@dataclass
class Patient:
    """What is examined. `trainer` runs nothing: it is there for a task that asks its length and its device."""

    task: TaskModule
    "On the run's device, in train mode. Do not change it: take a `clone()`."
    trainer: Run
    "Knows the plan: `planned_updates`, `optimizers`, `env.device`."
    train: Any
    "The loader, as the user gave it."
    val: Any
    "The loader of validation, a dict of several, or None."
    batches: list[Any]
    "At most the first four batches of train, as the loader serves them, on the run's device."
    val_batches: list[Any]
    "At most the first two of val; empty without."
    samples: list[tuple[Tensor, ...]] = field(default_factory=list)
    "Training samples one by one, on the CPU, in the order in which they are served; at most 3,000."
    val_samples: list[tuple[Tensor, ...]] = field(default_factory=list)
    original: TaskModule | None = None
    "The user's own task, where `task` is a copy: copies lose shared memory and attributes of parameters."
    validate_every: str | None = None
    "How often the planned run validates, where that of the examination does not."
    headroom: float = 1.0
    "How many times the first rate the schedule reaches."
    updates: int = 0
    losses: list[float] = field(default_factory=list)
    moved: set[str] = field(default_factory=set)
    "Parameters that have changed."
    ratios: dict[str, list[float]] = field(default_factory=dict)
    "Each update's size against its weights', by parameter."
    norms: list[float] = field(default_factory=list)
    "Of the gradients of each update, before they are clipped."
    plugins: list[Any] = field(default_factory=list)
    "Of the planned run, those included that the examination leaves out."
    track: Any = None
    "The weights before and after the last updates."
    held: dict[tuple[int, int], Any] = field(default_factory=dict)
    "What the last layers answer to a batch, by the batch's id and the number of updates."
    cut: set[str | None] = field(default_factory=set)
    "The optimizers whose gradients are known not to be the slope of their losses."
    groups: dict[str, Any] = field(default_factory=dict)
    "Samples of each stage that batches are made of."
    within: Deadline = field(default_factory=Deadline)
    "When steps of the present probe end in OutOfTime."
    is_late: bool = False
    "Whether the present probe has had its time."
    asked: str = "train"
    "The stage of the last step."
    refused: Exception | None = None
    "The last error of a step."
    cost: float = 0.0
    "What the last step took: another is not begun where less is left."

    reads: ClassVar[bool] = True
    "Whether samples of datasets may be read: that may change them."

    @property
    def shrinks(self) -> bool:
        """Whether the losses of the first updates fall all the same."""
        return len(self.losses) >= 4 and self.losses[-1] < 0.9 * self.losses[0]

    @cached_property
    def is_supervised(self) -> bool:
        """Whether a loss of torch's compares outputs with a tensor of the batch."""
        given = tensors(self.batches[0])
        for call in self.watched.losses:
            y = call.target
            plain = isinstance(y, Tensor) and not y.requires_grad and len(self.names) == 1
            if plain and any(x.numel() == y.numel() and bool((x.flatten().to(y) == y.flatten()).all()) for x in given):
                return True
        return False

    def note_motion(self, before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
        """Note by how much an update changed each matrix that is trained; rows of a table move when they are used."""
        trained = {id(p) for p in self.trainer.optimizers.parameters(None)}
        tables = {id(m.weight) for m in self.task.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
        for name, p in parameters(self.task).items():
            old, new = before.get(name), now.get(name)
            if id(p) not in trained:
                continue
            if old is None or new is None or old.shape != new.shape or p.ndim < 2 or p.numel() < 2 or id(p) in tables:
                continue
            size, moved = float(old.float().norm()), float((new.float() - old.float()).norm())
            if moved:
                self.moved.add(name)
            begins_at_zero = float(new.float().pow(2).mean()) < 0.1 / new[0].numel()  # far below a usual initialisation
            if size > 1e-6 and not (begins_at_zero and moved > 0.1 * size):
                self.ratios.setdefault(name, []).append(moved / size)

    @property
    def loaders(self) -> dict[str, Any]:
        """The loaders of train and of val, the first of several."""
        val = next(iter(self.val.values()), None) if isinstance(self.val, Mapping) else self.val
        return {"train": self.train, "val": val}

    @property
    def sources(self) -> dict[str, Any]:
        """Every loader by its name, those of several sources one by one."""
        return each({"train": self.train, "val": self.val})

    @property
    def stages(self) -> list[tuple[str, list[Any]]]:
        """The batches of train, and those of val where the task validates."""
        return [("train", self.batches), *([("val", self.val_batches)] if self.can_validate else [])]

    def lighten(self, share: float) -> None:
        """Keep this share of the samples of each batch, and a few at least: experiments on a large model need no more,
        and come to their end."""
        if share < 1:
            self.batches, self.val_batches = ([part(x, share) for x in xs] for xs in (self.batches, self.val_batches))
            self.__dict__.pop("watched", None)
            self.cost = 0.0

    def place(self, stage: str = "train") -> str:
        """The name of the step of a stage."""
        return f"{type(self.task).__name__}.{'training' if stage == 'train' else 'validation'}_step"

    @property
    def device(self) -> torch.device:
        """The run's device."""
        return self.trainer.env.device

    @cached_property
    def names(self) -> list[str | None]:
        """The optimizers' names; [None] for one optimizer."""
        return list(self.trainer.optimizers.entries) if self.trainer.optimizers.named else [None]

    def clone(self) -> TaskModule:
        """Return a copy of the task, in the modes in which it is trained, that knows the run."""
        twin = copy.deepcopy(self.task)
        twin.trainer = self.trainer
        return twin

    def fresh(self) -> TaskModule:
        """Return a copy of the task as it was given, to be trained."""
        return copied_task(self.original or self.task)

    def begin(self, within: Deadline) -> None:
        """Begin a probe that has this much time."""
        self.within, self.is_late = within, False

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has come: its fit sees it only after the probes."""
        stop = self.trainer.requests.open.get("stop")
        return stop is not None and stop.asker == SIGNAL

    def is_out_of_time(self) -> bool:
        """Whether what runs should end."""
        self.is_late = self.is_late or self.within.left <= self.cost or self.is_stopped
        return self.is_late

    def run(self, task: TaskModule, batch: Any, stage: str = "train", name: str | None = None, seed: int = SEED) -> Any:
        """Return the output of a step of any task, with the same random numbers every time, unless a seed is given.

        The task runs in the mode that it is in. `name` is that of an optimizer, where there are several: by default
        the first.
        """
        if self.is_out_of_time():
            raise OutOfTime
        self.asked, began = stage, self.within.clock()
        try:
            return self._stepped(task, batch, name, seed)
        except Exception as error:
            self.refused = error
            raise
        finally:
            self.cost = self.within.clock() - began

    def _stepped(self, task: TaskModule, batch: Any, name: str | None, seed: int) -> Any:
        reseed(seed)
        if self.asked == "train":
            name = self.names[0] if name is None else name
            with torch.enable_grad():  # a step may ask for gradients itself
                return task.training_step(batch) if name is None else task.training_step(batch, name)  # pyright: ignore[reportCallIssue]
        with torch.enable_grad() if task.evaluation == "grad" else nullcontext():
            return task.validation_step(batch)

    def loss(self, task: TaskModule, batch: Any, name: str | None = None, seed: int = SEED) -> Tensor:
        """Return the loss of a training step, with its graph; see `run`."""
        return loss_of(self.run(task, batch, "train", name, seed))

    @cached_property
    def can_validate(self) -> bool:
        return bool(self.val_batches) and defines(self.task, "validation_step")

    @cached_property
    def watched(self) -> StepWatch:
        """The calls of the first training step, of each optimizer."""
        watch = StepWatch(batch_size(self.batches[0]))
        with watch:
            for name in self.names:
                self.run(self.clone(), self.batches[0], name=name)
        return watch

    @cached_property
    def first_input(self) -> tuple[str, Tensor] | None:
        """The first layer with a matrix that the first step calls, and what it is given."""
        task = self.clone()
        with torch.no_grad(), first_input(task) as seen:
            self.loss(task, self.batches[0])
        return next(iter(seen), None)

    @cached_property
    def activity(self) -> list[list[tuple[str, str, Tensor]]]:
        """What an `ActivationWatch` notes in the first steps."""
        task, rounds = self.clone(), list[list[tuple[str, str, Tensor]]]()
        for batch in self.batches[:3]:
            with torch.no_grad(), ActivationWatch() as watch:
                self.run(task, batch)
            rounds.append(watch.found)
        return rounds

    @cached_property
    def gradient_sizes(self) -> list[tuple[str, float]]:
        """The size of each matrix's gradient against its own, in a step."""
        self.loss(task := self.clone(), self.batches[0]).backward()
        return gradient_sizes(task)

    @cached_property
    def labels(self) -> Tensor | None:
        """Class labels of all samples in order, where each has one and the loss is one of classes."""
        return self.labels_of(self.samples)

    def labels_of(self, samples: list[tuple[Tensor, ...]]) -> Tensor | None:
        """Class labels of some samples, where each has one and the loss is one of classes."""
        place = self.label_position
        if place is None or not samples or any(len(sample) <= place for sample in samples):
            return None
        found = [sample[place] for sample in samples]
        return torch.stack(found).flatten().long().cpu() if all(x.numel() == 1 for x in found) else None

    @cached_property
    def class_loss(self) -> Any:
        """The first loss over class labels, one of each sample, or None."""
        for call in self.watched.losses:
            y = call.target
            if not isinstance(y, Tensor) or not len(y.shape):
                continue
            whole = y.ndim == 1 and not y.is_floating_point()
            if call.name in ("cross_entropy", "nll_loss", "multi_margin_loss") and whole:
                return call
            if call.name.startswith("binary") and y.numel() == len(y) and bool(((y == 0) | (y == 1)).all()):
                return call
        return None

    @cached_property
    def label_position(self) -> int | None:
        """The place of the class labels among the tensors of a sample."""
        call = self.class_loss
        if call is None:
            return None
        y = call.target.flatten()
        for place, x in enumerate(tensors(self.batches[0])):
            if x.numel() == y.numel() and bool((x.flatten().to(y) == y).all()):
                return place
        return None


def copied_task(task: TaskModule) -> TaskModule:
    try:
        return copy.deepcopy(task)
    except Exception as error:
        raise TaskError(
            f"{type(task).__name__} cannot be copied ({type(error).__name__}: {error}), and copies are examined. Make "
            "what cannot be copied in a method, or define __deepcopy__."
        ) from error


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, Mapping) else output


def numbers(result: Any) -> dict[str, float]:
    """The scalars that a step returned, the loss included."""
    items = result if isinstance(result, Mapping) else {"loss": result}
    found = {}
    for name, value in items.items():
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            found[str(name)] = float(value.detach())
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[str(name)] = float(value)
    return found


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of a batch, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def are_samples(batch: Any) -> bool:
    """Whether the rows of a batch are samples: not where tensors differ in length, or one relates each row to each."""
    size, found = batch_size(batch), [x for x in tensors(batch) if x.ndim]
    square = any(x.shape == (size, size) and _relates(x) for x in found)
    return bool(found) and not square and all(len(x) == size for x in found)


def _relates(x: Tensor) -> bool:
    """Whether a square tensor says how each row stands to each: it is symmetric, of 0 and 1, or rows sum to 1."""
    x = x.detach().double()
    return torch.equal(x, x.T) or bool(((x == 0) | (x == 1)).all()) or bool(((x.sum(1) - 1).abs() < 1e-4).all())


def part(batch: Any, share: float) -> Any:
    """The first samples of a batch, a share of them and FEWEST at least; all where its rows are no samples."""
    count = max(FEWEST, int(share * (batch_size(batch) or 0)))
    return pytree.tree_map_only(Tensor, lambda x: x[:count] if x.ndim else x, batch) if are_samples(batch) else batch


def rows(batch: Any) -> list[tuple[Tensor, ...]]:
    """The samples of a batch: a row of each tensor. Where tensors differ in length, rows are no samples."""
    if not are_samples(batch):
        return []
    return list(zip(*(x.detach().cpu().unbind() for x in tensors(batch) if x.ndim), strict=True))


def each(given: Mapping[str, Any]) -> dict[str, Any]:
    """The loaders of some stages by name, those of several sources one by one."""
    found: dict[str, Any] = {}
    for stage, loader in given.items():
        several = loader.loaders if isinstance(loader, Combined) else loader
        found |= {f"{stage} {name}": x for name, x in several.items()} if isinstance(several, dict) else {stage: loader}
    return {name: loader for name, loader in found.items() if loader is not None}


def first(loader: Any, count: int) -> list[Any]:
    """The first batches of a loader."""
    return list(itertools.islice(iter(loader), count)) if loader is not None else []


@contextmanager
def no_trace(device: torch.device) -> Iterator[None]:
    """Restore every global generator and the grad mode, and silence warnings: a probe repeats what a fit has said.

    Layers of transformers leave out their fast path, whose nested tensors most operations refuse.
    """
    rng, is_fast = RNGState.capture(device), torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
        rng.restore(device)


def _own(value: Any) -> Any:
    """A copy of what a module keeps, but for tensors, and for data."""
    is_data = isinstance(value, (list, tuple, dict, set)) and len(value) > MANY
    return value if is_data else pytree.tree_map(lambda x: x, value)


@contextmanager
def own_state_kept(task: nn.Module) -> Iterator[None]:
    """Give modules back the attributes of their own: a step collects what the end of a validation uses, and a thousand
    steps would collect a thousand times that. Tensors that are written into stay as they are."""
    theirs = vars(nn.Module()).keys()
    kept = [
        (module, {name: _own(value) for name, value in vars(module).items() if name not in theirs})
        for module in task.modules()
    ]
    try:
        yield
    finally:
        for module, own in kept:
            for name in vars(module).keys() - theirs - own.keys():
                del module.__dict__[name]
            vars(module).update(own)


def named(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def parameters(task: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in task.named_parameters() if p.requires_grad}


def copied(task: nn.Module) -> dict[str, Tensor]:
    """Copies of the trainable parameters."""
    return {name: p.detach().clone() for name, p in parameters(task).items()}


def like(twin: TaskModule, task: nn.Module) -> TaskModule:
    """Give a copy the modes of the task, which is being trained."""
    for mine, own in zip(twin.modules(), task.modules(), strict=True):
        mine.training = own.training
    return twin
