"""Feed: windows of batches from any loader, epoch after epoch.

A loader is any iterable: a DataLoader, a forge loader, a list of batches, an object with `__iter__`. The feed knows
before a window's first backward how long the window is and whether it ends the epoch.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from forge import options
from forge.data.known_streams import streams_in_nodes
from forge.data.own_generators import data_roots, data_states, states_of
from forge.data.protocols import is_live, is_seekable
from forge.data.sample_rng import restored_generators, seed_generators
from forge.errors import DataError
from forge.rng import combine_seeds
from forge.util.digest import agrees, lasting
from forge.util.generators import Generators, find_generators

logger = logging.getLogger("forge")


def length_of(loader: Any) -> int | None:
    """Return a loader's number of batches, or None if it does not know, or not yet, whatever it raises then."""
    try:
        return len(loader)
    except Exception:
        return None


def batch_size(batch: Any) -> int | None:
    """Return the number of samples in a batch: the first dimension of its first tensor or array, or None."""
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])  # these are always on the host
    if isinstance(batch, (tuple, list)):
        parts = batch
    elif isinstance(batch, torch.Tensor):
        parts = (batch,)
    elif isinstance(batch, Mapping):
        parts = batch.values()
    elif is_dataclass(batch):
        parts = [getattr(batch, field.name) for field in fields(batch)]
    else:
        shape = getattr(batch, "shape", None)  # an array, such as numpy's
        return int(shape[0]) if isinstance(shape, tuple) and shape else None
    for part in parts:
        if isinstance(part, torch.Tensor):
            if part.ndim:
                return part.size(0)
        elif (size := batch_size(part)) is not None:
            return size
    return None


def count_samples(window: list[Any], items: list[Any]) -> int:
    """Return the samples in a window whose task defines its own weights; a batch of unknown size counts its items."""
    counted = 0
    for batch, n in zip(window, items, strict=True):
        size = batch_size(batch)
        if size is None and isinstance(n, int):  # a tensor is not read for this
            size = n
        counted += size or 0
    return counted


def is_stateful(loader: Any) -> bool:
    """Whether a loader or dataset has `state_dict()` and `load_state_dict(state)`."""
    return has_state(loader) and _needs_no_argument(loader.state_dict)


def has_state(value: Any) -> bool:
    """Whether an object has `state_dict` and `load_state_dict`, with any arguments."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _needs_no_argument(method: Callable[..., Any]) -> bool:
    try:
        inspect.signature(method).bind()
    except TypeError:  # streaming's StreamingDataset must be told how many samples were used
        return False
    except ValueError:  # a signature is not known
        pass
    return True


def holds_dataloader(loader: Any) -> bool:
    """Whether this is a pipeline over a DataLoader, as webdataset's WebLoader is: torch takes it for a dataset."""
    stages = getattr(loader, "pipeline", None)
    return isinstance(stages, list) and bool(stages) and isinstance(stages[0], DataLoader)


def check_loader(loader: Any, stage: str) -> None:
    """Raise DataError for an object that is not a loader, or an empty one."""
    if isinstance(loader, Dataset) and not holds_dataloader(loader):
        raise DataError(
            f"{stage} got the dataset {type(loader).__name__} itself. Wrap it in a loader: "
            f"forge.data.Loader({type(loader).__name__.lower()}, batch_size=..., shuffle={stage == 'train'})."
        )
    if not hasattr(loader, "__iter__"):
        raise DataError(f"{stage} got a {type(loader).__name__}, which cannot be iterated. Pass a loader.")
    if length_of(loader) == 0:
        raise DataError(f"The {stage} loader is empty. Check its dataset, sampler and drop_last.")


class Feed:
    """Windows of batches from a training loader, and the position of the run in the epoch."""

    def __init__(self, loader: Any, allow_inexact: bool = False):
        check_loader(loader, "train")
        self.loader = loader
        self.length = length_of(loader)
        self.batches = 0
        "Batches of the current epoch that have been yielded in windows."
        self.samples = 0
        "Samples of the current epoch that have been yielded; the Trainer counts them."
        self.live = is_live(loader)
        "Whether batches are made while the run trains (`forge.data.live`): none is read ahead."
        self._stateful = not is_seekable(loader) and is_stateful(loader) and not self.live
        self._state: Any = None
        self._ahead: list[Any] = []
        self._due: str | None = None
        "The checksum of the batch that a loader without a length must give next, after a state was loaded."
        self._lenient = allow_inexact
        self._own: Generators = {}
        self._drawn: dict[str, Any] | None = None
        self._has_given = False
        self._resuming = False

    def epoch(self, number: int, plan: Callable[[], int]) -> Iterator[tuple[list[Any], bool]]:
        """Yield the windows of one epoch: (batches, whether this is the last). `plan` returns the next window's length.

        A window is shorter than planned only at the end, and never empty. If `plan` loads a state, none follows. A
        loader without a length is read one batch ahead; one with a length is not, so no sample is drawn early.
        """
        batches = self._start(number)
        length = self.length = length_of(self.loader) if self.live else self.length
        ahead: list[Any] = []
        last = False
        while not last:
            window, ahead = ahead, []
            planned = plan()
            if self._resuming:  # the plan has set another position, which may be in another epoch
                return
            count = planned if length is None else min(planned, length - self.batches)
            if count < 1:
                raise DataError(f"forge_plan_step returned a window of {count} micro-batches; it must be at least 1.")
            try:
                while len(window) < count:
                    window.append(next(batches))
            except StopIteration as stop:
                self._refuse_short_epoch(len(window), stop)
            if self._due is not None:
                self._compare(window[0])
            self.batches += len(window)
            if length is None or self.batches == length:
                if self._own:
                    self._drawn = states_of(self._own)
                if self._stateful:
                    self._state = self._loader_state()  # before reading ahead changes it
                last = not self._look_ahead(batches, ahead)
                self._ahead = ahead
            if last:
                self.batches = self.samples = 0
                if self._own:
                    self._drawn = states_of(self._own)
                if self._stateful:
                    self._state = self._loader_state()
            self._has_given = True
            yield window, last

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last window, and the loader's own state if it has one."""
        state = self.loader.state_dict() if self.live and not self._resuming else self._state
        if self._stateful and self.length is not None and self.batches and not self._resuming:
            state = self._loader_state()  # nothing was read ahead
        place = {"batches": self.batches, "samples": self.samples, "loader": state}
        due = self._due if self._resuming or not self._tells_next else lasting(self._ahead[0])
        return place if due is None else {**place, "next": due}

    @property
    def _tells_next(self) -> bool:
        """Whether the next batch is known, and does not depend on the number of ranks."""
        return self._stateful and bool(self._ahead) and not hasattr(self.loader, "data_world")

    def generator_states(self) -> dict[str, Any]:
        """Return the states of the generators that the data keep in this process, after the last window."""
        return data_states(self.loader) if self._drawn is None else self._drawn

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next epoch at this position."""
        for name in ("batches", "samples"):
            options.whole(state[name], f"data.{name}", 0)
        self.batches, self.samples, self._state = state["batches"], state["samples"], state["loader"]
        if self.length is not None and self.batches > self.length:
            raise DataError(f"The checkpoint is {self.batches:,} batches into an epoch that has {self.length:,}.")
        self._due = None if hasattr(self.loader, "data_world") else state.get("next")
        self._resuming = True

    def fingerprint(self) -> dict[str, Any]:
        """Return what must not change when a run resumes: the loader's fingerprint, else its number of batches."""
        return self.loader.fingerprint() if hasattr(self.loader, "fingerprint") else {"batches": self.length}

    def _start(self, number: int) -> Iterator[Any]:
        """Set the loader, or its sampler, to this epoch and position, and start iterating."""
        self._own = find_generators(data_roots(self.loader)) if self.length is None else {}
        self._drawn = states_of(self._own) if self.length is None else None  # it is read ahead of the windows
        resuming, self._resuming = self._resuming, False
        if not resuming:
            self.batches = self.samples = 0
        set_epoch(self.loader, number)
        if is_seekable(self.loader):
            self.loader.seek(number, self._position(number))
        elif resuming and self.live:
            self.loader.load_state_dict(self._state)
        elif resuming and self._stateful and self._state is not None:
            return self._continue(number)
        elif resuming and self.batches:
            raise DataError(f"{type(self.loader).__name__} cannot resume in the middle of an epoch.")
        return self._begin(number)

    def _position(self, number: int) -> int:
        """Return the samples consumed in this epoch; the loader's own count is better than the shapes of batches."""
        return self.loader.position(number, self.batches) if hasattr(self.loader, "position") else self.samples

    def _loader_state(self) -> Any:
        """Return a copy of a loader's state, which the loader may go on changing."""
        return copy.deepcopy(self.loader.state_dict())

    def _begin(self, number: int) -> Iterator[Any]:
        """Start a new pass over the loader.

        A loader with a state may draw random numbers as its pass begins (torch's workers need a seed), and a resumed
        one begins more often. So these are seeded from the run's seed and the epoch, and the run's own generators are
        restored.
        """
        if not self._stateful:
            return iter(self.loader)
        word = combine_seeds(torch.initial_seed(), number)
        _draw_apart(self.loader, word)
        with restored_generators():
            seed_generators(word)
            return iter(self.loader)

    def _continue(self, number: int) -> Iterator[Any]:
        """Continue a stateful loader from its saved state; one that was at the end of an epoch begins the next."""
        self.loader.load_state_dict(copy.deepcopy(self._state))
        if self.batches:
            return self._begin(number)
        set_epoch(self.loader, number)  # the state may have restored the epoch that is over
        batches = self._begin(number)
        try:
            return itertools.chain([next(batches)], batches)
        except StopIteration:
            set_epoch(self.loader, number)
            return self._begin(number)

    def _compare(self, batch: Any) -> None:
        """Refuse a loader whose state does not lead to the batch that was next when it was saved."""
        due, self._due = self._due, None
        if due is None or agrees(due, batch):
            return
        said = (
            f"The train loader {type(self.loader).__name__} gives another batch after its state was loaded than before "
            "it was saved: samples would be lost or seen twice."
        )
        if self._lenient:
            logger.warning("%s It goes on (allow_inexact).", said)
            return
        raise DataError(
            f"{said} Seed what shuffles, let an order that differs between epochs follow from set_epoch(epoch) of the "
            "dataset, and draw no random numbers in its workers; or pass the dataset in a forge.data.Loader. Or set "
            "allow_inexact=True (trainer.allow_inexact=true on the command line)."
        )

    def _look_ahead(self, batches: Iterator[Any], ahead: list[Any]) -> bool:
        """Read the next batch into `ahead`; return whether it exists."""
        try:
            ahead.append(next(batches))
        except StopIteration:
            return False
        if self.length is not None:
            raise DataError(
                f"The train loader gave more batches than its length of {self.length}. "
                "Fix its __len__, or remove it for an endless stream."
            )
        return True

    def _refuse_short_epoch(self, given: int, stop: StopIteration) -> None:
        """Refuse an epoch that ends before its length, or before its first window."""
        if given == 0 and not self.batches and self._has_given:
            raise DataError(
                f"train is a one-shot iterator ({type(self.loader).__name__}) and its one epoch is consumed: iterated "
                "again, it gives nothing. Pass a loader or a list that can be iterated again, or set max_epochs=1."
            ) from stop
        if self.length is not None:
            raise DataError(
                f"The train loader gave {self.batches + given} batches in this epoch, but its length is "
                f"{self.length}. Fix its __len__{_raised_by(stop)}."
            ) from stop
        if given == 0 and self.batches:
            raise DataError(
                f"The train loader {type(self.loader).__name__} gave no more batches in this epoch after it was "
                f"resumed at batch {self.batches}, although the run was saved before the epoch's end. Check its "
                "load_state_dict or seek, and that the data are those that the run began with."
            )
        if given == 0:
            raise DataError("The train loader gave no batch in this epoch. Check its dataset, sampler and drop_last.")


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader, or of the sampler or dataset inside it."""
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for candidate in (loader, sampler, inner, getattr(loader, "dataset", None)):
        if hasattr(candidate, "set_epoch"):
            candidate.set_epoch(epoch)  # pyright: ignore[reportOptionalMemberAccess]
            return
    for stream in streams_in_nodes(loader):
        stream.set_epoch(epoch)


def _draw_apart(loader: Any, word: int) -> None:
    """Give a DataLoader whose `__iter__` is a generator function, as StreamingDataLoader's is, a generator for the seed
    of its workers: it draws that seed with the first batch, when the run's own generators are in place."""
    while not isinstance(loader, DataLoader) and hasattr(loader, "loader"):
        loader = loader.loader
    if isinstance(loader, DataLoader) and inspect.isgeneratorfunction(type(loader).__iter__):
        if loader.generator is None:
            loader.generator = torch.Generator()
        loader.generator.manual_seed(word >> 1)


def _raised_by(stop: StopIteration) -> str:
    """Return where a StopIteration was raised, if by user code rather than by the iterator's end."""
    trace = stop.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code is Feed.epoch.__code__:
        return ""
    code = trace.tb_frame.f_code
    return f", or fix {code.co_qualname} ({code.co_filename}:{trace.tb_lineno}), which raised StopIteration"


def window_weights(items: Sequence[int | torch.Tensor]) -> tuple[int, list[float | torch.Tensor] | None]:
    """Return the weights of a window's micro-batches: (divisor, None) if all are equal, else (1, factors).

    Tensors are never compared, because that would synchronise with the device.
    """
    if len(items) < 2:  # a single batch counts fully, at any weight
        return 1, None
    if set(map(type, items)) == {int} and items[0] and items.count(items[0]) == len(items):
        return len(items), None  # the usual case
    if any(isinstance(n, torch.Tensor) for n in items):
        total = exact(sum(items[1:], start=items[0]))
        return 1, [n / total for n in items]
    total = sum(items)
    if total == 0 and len(items) > 1:
        raise DataError("num_items returned 0 for every micro-batch of a window: nothing to average.")
    if all(n == items[0] for n in items):
        return len(items), None
    return 1, [n / total for n in items]


def exact(count: int | torch.Tensor) -> Any:
    """Return a count to divide by: a tensor in float64 where its device has that, since integers divide in float32."""
    if not isinstance(count, torch.Tensor) or count.device.type == "mps":
        return count
    return count.double()


def weigh_loss(loss: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """Return the loss times its factor, which is as exact as the loss: a float32 loss does not become float64."""
    if isinstance(factor, torch.Tensor) and loss.dtype != torch.float64:
        factor = factor.float()
    return loss * factor


def shared_weights(
    items: Sequence[int | torch.Tensor], total: int | torch.Tensor, data_world: int
) -> tuple[int, list[float | torch.Tensor] | None]:
    """Return `window_weights` for one of several ranks; `total` counts the window's items over all of them."""
    if isinstance(total, int):
        if total == 0:
            raise DataError("num_items returned 0 for every micro-batch of a window, on every rank.")
        if all(n * data_world * len(items) == total for n in items):
            return len(items), None
    return 1, [n * data_world / total for n in items]
