"""Step: one optimizer update, made of a window of micro-batches.

The window's true length and weights are known before its first backward, so the epoch's last, shorter window averages
right, and whoever needs to know the last micro-batch (`no_sync`) knows it beforehand. Evaluation uses a Step too, to
say which stage and batch it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from forge.errors import DataError
from forge.metrics import torchmetrics
from forge.optim.optimizers import drop_gradients
from forge.rng import RNGState

if TYPE_CHECKING:
    from forge.engine.trainer import Trainer


class Step:
    """What hooks are given: where the run is, and what may be asked of it."""

    micro: int = 0
    "The current micro-batch of the window (in evaluation: the batch)."
    name: str | None = None
    "The optimizer whose turn it is; None with one optimizer, and in forge_step_end."
    prefix: str = "train/"
    "What the names of the current optimizer's metrics begin with."
    updated: bool = False
    "Whether the weights were changed."
    updated_names: tuple[str, ...] = ()
    "With several optimizers, which of them stepped."
    skip_reason: str | None = None
    "Why this update is skipped, if it is."
    loss: Tensor | None = None
    "The window's weighted loss; kept only for owners that replay."
    borrowed: bool = False
    "In evaluation: whether the batch belongs to another rank, and runs here for company only."
    _prepared: list[Any] | None = None
    _rng: list[RNGState] | None = None
    _record: bool = True
    _finished: bool = False
    _divisor: int = 1
    _factors: list[float | Tensor] | None = None

    def __init__(
        self,
        trainer: Trainer,
        stage: str = "train",
        window: Sequence[Any] = (),
        items: Sequence[int | Tensor] = (),
        samples: int = 0,
        ends_epoch: bool = False,
        data_wait: float = 0.0,
        total: int | Tensor | None = None,
    ):
        progress = trainer.progress
        self.trainer: Trainer = trainer
        self.stage: str = stage
        "train, val, test or predict."
        self.index: int = progress.update
        "Updates done before this one."
        self.epoch: int = progress.epoch
        "Epochs done before this step."
        self.samples_before: int = progress.sample
        "Samples trained on before this step."
        self.window: Sequence[Any] = window
        "The raw micro-batches."
        self.items: Sequence[int | Tensor] = items
        "The weight of each micro-batch: `num_items`."
        self.samples: int = samples
        "Samples in the window, over all ranks."
        self.ends_epoch: bool = ends_epoch
        "Whether this is the last step of its epoch."
        self.data_wait: float = data_wait
        "Seconds spent waiting for the loader."
        if total is not None:
            self._divisor, self._factors = shared_weights(items, total, trainer.env.shares)
        elif len(items) > 1 or (items and type(items[0]) is not int):
            self._divisor, self._factors = window_weights(items)

    # -- asked by plugins ---------------------------------------------------------------------------------------------

    @property
    def is_last_micro(self) -> bool:
        """Whether the current micro-batch is the window's last."""
        return self.micro == len(self.window) - 1

    @property
    def ends_interval(self) -> bool:
        """Whether a log follows this step: what is recorded once in it is logged as it is."""
        update, trainer = self.index + 1, self.trainer
        return self.ends_epoch or update % trainer.log_every == 0 or update == trainer.max_updates

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose turn it is."""
        return self.trainer.optimizers[self.name]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the optimizer whose turn it is; of all optimizers in forge_step_end."""
        return self.trainer.optimizers.parameters(self.name)

    def record(self, name: str, value: float | Tensor) -> None:
        """Log a scalar as its mean over the log interval. It stays on the device; nothing is read now."""
        if self._record:
            self.trainer.means.add(name, value)

    def skip_update(self, reason: str, told: bool = False) -> None:
        """Do not step the current optimizer. The reason must follow from values that are equal on all ranks. The log
        says who asked, and why, unless the plugin has `told` of it in a line of its own."""
        if self.skip_reason is None:
            self.skip_reason = reason
            self.trainer.requests.note("skip_update", reason, told=told)

    # -- the two halves of a train step -------------------------------------------------------------------------------

    def run_window(self, record: bool = True, replay: bool = False) -> None:
        """First half: every micro-batch, through `trainer.hooks`.

        `replay=True` runs the same prepared batches again with the same random numbers, and leaves the RNG as it was.
        """
        if replay:
            self._replay(record)
            return
        hooks = self.trainer.hooks
        self._record, self.loss = record, None
        kept = self._kept_batches()
        for micro, raw in enumerate(self.window):
            self.micro = micro
            if kept is None:
                batch = hooks.forge_prepare_batch(self, raw)
            else:
                if micro == len(kept):
                    kept.append(hooks.forge_prepare_batch(self, raw))
                batch = kept[micro]
                if self._rng is not None:
                    self._rng.append(RNGState.capture(self.trainer.env.device))  # preparing may have drawn numbers
            hooks.forge_micro_step(self, batch)

    def finish(self) -> None:
        """Second half: gradients through their three phases, the optimizer's step, and zero_grad."""
        hooks = self.trainer.hooks
        self.gradient_phases()
        self.updated = self.skip_reason is None and bool(hooks.forge_optimizer_step(self))
        drop_gradients(self.optimizer)
        self._finished = True

    def gradient_phases(self) -> None:
        """Finalize, inspect, edit; what is skipped by now is not edited."""
        hooks = self.trainer.hooks
        if hooks.forge_finalize_grads is not None:
            hooks.forge_finalize_grads(self)
        if hooks.forge_inspect_grads is not None:
            hooks.forge_inspect_grads(self)
        if hooks.forge_edit_grads is not None and self.skip_reason is None:
            hooks.forge_edit_grads(self)

    def _kept_batches(self) -> list[Any] | None:
        """The prepared batches, where they are kept for another run or another optimizer; for another run, RNG too."""
        if not self.trainer.keep_batches:
            return None
        self._rng = [] if self.trainer.keep_rng else None
        if self._prepared is None:
            self._prepared = []
        return self._prepared

    def _replay(self, record: bool) -> None:
        if self._prepared is None or self._rng is None:
            raise RuntimeError("run_window(replay=True) needs a first run, and `replays = True` on the owner's class.")
        device = self.trainer.env.device
        now, recorded = RNGState.capture(device), self._record
        self._record, self.loss = record, None
        with nullcontext() if record else torchmetrics.kept(self.trainer.task):
            for micro, (batch, rng) in enumerate(zip(self._prepared, self._rng, strict=True)):
                self.micro = micro
                rng.restore(device)
                self.trainer.hooks.forge_micro_step(self, batch)
        self._record = recorded
        now.restore(device)

    # -- used by core -------------------------------------------------------------------------------------------------

    def begin_turn(self, name: str | None) -> None:
        """Hand the step to one of several optimizers."""
        self.name, self.updated, self.skip_reason, self._finished = name, False, None, False
        self.prefix = "train/" if name is None else f"train/{name}/"

    def weigh(self, loss: Tensor) -> Tensor:
        """The loss as it counts in its window."""
        if self._factors is not None:
            weighed = loss * self._factors[self.micro]
        else:
            weighed = loss if self._divisor == 1 else loss / self._divisor
        if self._prepared is not None:
            self.loss = weighed.detach() if self.loss is None else self.loss + weighed.detach()
        return weighed

    def closure(self) -> Callable[[], Tensor]:
        """What a closure optimizer calls: the window again, through all gradient phases. The first call is free: its
        gradients are there already."""
        first = [self._whole_loss()]

        def evaluate() -> Tensor:
            if first:
                return first.pop()
            drop_gradients(self.optimizer)
            recorded, self._record = self._record, False
            self.run_window(record=False, replay=True)
            self._record = False
            self.gradient_phases()
            self._record = recorded
            return self._whole_loss()

        return evaluate

    def _whole_loss(self) -> Tensor:
        """The window's loss over all ranks: a line search must decide the same on each of them."""
        assert self.loss is not None
        env = self.trainer.env
        return self.loss if env.world == 1 else env.sum(self.loss) / env.world


def window_weights(items: Sequence[int | Tensor]) -> tuple[int, list[float | Tensor] | None]:
    """How the micro-batches of a window count: (divisor, None) where they count alike, else (1, a factor each).

    Tensors are never compared, because that would read the device.
    """
    if len(items) < 2:  # one batch counts whole, whatever it weighs
        return 1, None
    if set(map(type, items)) == {int} and items[0] and items.count(items[0]) == len(items):
        return len(items), None  # nearly always
    if any(isinstance(n, Tensor) for n in items):
        total = sum(items[1:], start=items[0])
        return 1, [n / total for n in items]
    total = sum(items)
    if total == 0 and len(items) > 1:
        raise DataError("num_items gave 0 for every micro-batch of a window: there is nothing to average.")
    if all(n == items[0] for n in items):
        return len(items), None
    return 1, [n / total for n in items]


def shared_weights(
    items: Sequence[int | Tensor], total: int | Tensor, shares: int
) -> tuple[int, list[float | Tensor] | None]:
    """`window_weights` on one of several ranks, whose strategy averages gradients: `total` counts the items of the
    window over all of them."""
    if isinstance(total, int):
        if total == 0:
            raise DataError("num_items gave 0 for every micro-batch of a window, on every rank: nothing to average.")
        if all(n * shares * len(items) == total for n in items):
            return len(items), None
    return 1, [n * shares / total for n in items]
