"""Step: one optimizer update, made of a window of micro-batches.

The window's true length and weights are known before its first backward, so the epoch's last, shorter window averages
right, and a strategy knows the last micro-batch beforehand (`no_sync`). Evaluation uses a Step too, to name the stage
and the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from forge.data.accumulation_windows import shared_weights, weigh_loss, window_weights
from forge.metrics import torchmetrics
from forge.optim.optimizers import drop_gradients
from forge.rng import RNGState
from forge.torch_internals import writes

if TYPE_CHECKING:
    from forge.contract.dispatch import Hooks
    from forge.contract.run import Run
    from forge.metrics.means import Means

SECOND_PASS = "second_pass"
"""What an owner of forge_train_step provides that runs its window more than once: batches and RNG are kept for it."""


class Step:
    """One update, as hooks get it: where the run is, and what may be asked of it.

    A plugin that owns `forge_train_step` runs the update with `run_window` and `finish`, as often as it needs, on other
    batches with `substitute`, and without a trace with `restored_after`. An observer looks at `recording` to tell the
    first run of a window from a replay.
    """

    micro: int = 0
    "The current micro-batch of the window (in evaluation: the batch)."
    name: str | None = None
    "The optimizer whose turn it is; None with one optimizer, and in forge_step_end."
    prefix: str = "train/"
    "The beginning of the names of the current optimizer's metrics."
    updated: bool = False
    "Whether the weights were changed."
    updated_names: tuple[str, ...] = ()
    "With several optimizers, those that stepped."
    skip_reason: str | None = None
    "Why this update is skipped, if it is."
    loss: Tensor | None = None
    "The window's weighted loss; kept only for owners that replay."
    is_padding: bool = False
    "In evaluation: whether this is a padding batch, which belongs to another rank and does not count here."
    loader: str | None = None
    "In evaluation: the name of the loader, where there are several."
    recording: bool = True
    "Whether metrics of what runs now are recorded; False in a replay."
    finished: bool = False
    "Whether `finish` has run for the current optimizer."
    divisor: int = 1
    "What each micro-batch's loss is divided by, where all weigh the same."
    factors: list[float | Tensor] | None = None
    "What each micro-batch's loss is multiplied by; None where all weigh the same."
    prepared: list[Any] | None = None
    "The prepared batches, where they are kept: several optimizers, or a window that runs more than once."
    _rng: list[RNGState] | None = None

    def __init__(
        self,
        trainer: Run,
        stage: str = "train",
        window: Sequence[Any] = (),
        items: Sequence[int | Tensor] = (),
        samples: int = 0,
        ends_epoch: bool = False,
        data_wait: float = 0.0,
        total: int | Tensor | None = None,
    ):
        progress = trainer.progress
        self.trainer: Run = trainer
        "The run; its Trainer."
        self.stage: str = stage
        "train, val, test or predict; collect, while a live loader makes data with the task."
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
            self.divisor, self.factors = shared_weights(items, total, trainer.env.data_world)
        elif len(items) > 1 or (items and type(items[0]) is not int):
            self.divisor, self.factors = window_weights(items)

    # -- for plugins --------------------------------------------------------------------------------------------------

    @property
    def is_last_micro(self) -> bool:
        """Whether the current micro-batch is the window's last."""
        return self.micro == len(self.window) - 1

    @property
    def ends_interval(self) -> bool:
        """Whether a log follows this step: a value recorded once in it is logged unchanged."""
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
        if self.recording:
            self.trainer.means.add(name, value)

    def skip_update(self, reason: str, quiet: bool = False, by: str = "") -> None:
        """Do not step the current optimizer. The reason must follow from values that are equal on all ranks.

        The log names the requester `by` (by default the calling function) and the reason; at debug level if `quiet`.
        """
        if self.skip_reason is None:
            self.skip_reason = reason
            self.trainer.requests.note("skip_update", reason, by=by, quiet=quiet)

    # -- the two halves of a train step -------------------------------------------------------------------------------

    def run_window(self, record: bool = True, replay: bool = False) -> None:
        """First half: every micro-batch.

        `replay=True` runs the same prepared batches again with the same random numbers, and then restores the RNG.
        """
        if replay:
            self._replay(record)
            return
        trainer = self.trainer
        hooks = trainer.hooks
        self.recording, self.loss = record, None
        kept = self._kept_batches() if trainer.keep_batches else None
        for micro, raw in enumerate(self.window):
            self.micro = micro
            if kept is None or micro == len(kept):
                batch = hooks.forge_prepare_batch(self, raw)
            else:
                batch = kept[micro]
            if kept is not None:
                if micro == len(kept):
                    kept.append(batch)
                if self._rng is not None:
                    self._rng.append(RNGState.capture(trainer.env.device))  # preparing may have drawn numbers
            hooks.forge_micro_step(self, batch)

    def finish(self) -> None:
        """Second half: gradients through their three phases, the optimizer's step, and zero_grad."""
        trainer = self.trainer
        hooks = trainer.hooks
        self.gradient_phases(hooks)
        self.updated = self.skip_reason is None and bool(hooks.forge_optimizer_step(self))
        drop_gradients(trainer.optimizers.entries[self.name].optimizer)
        self.finished = True

    def gradient_phases(self, hooks: Hooks) -> None:
        """Finalize, inspect, edit; a skipped update is not edited."""
        if hooks.forge_finalize_grads is not None:
            hooks.forge_finalize_grads(self)
        if hooks.forge_inspect_grads is not None:
            hooks.forge_inspect_grads(self)
        if hooks.forge_edit_grads is not None and self.skip_reason is None:
            hooks.forge_edit_grads(self)

    def _kept_batches(self) -> list[Any]:
        """The list of prepared batches for another run or another optimizer; for another run, RNG states too."""
        self._rng = [] if self.trainer.keep_rng else None
        if self.prepared is None:
            self.prepared = []
        return self.prepared

    def _replay(self, record: bool) -> None:
        if self.prepared is None or self._rng is None:
            raise RuntimeError(
                f"run_window(replay=True) needs a first run, and an owner that provides {SECOND_PASS!r}."
            )
        device = self.trainer.env.device
        now, recorded = RNGState.capture(device), self.recording
        self.recording, self.loss = record, None
        with nullcontext() if record else torchmetrics.restored_after(self.trainer.task):
            for micro, (batch, rng) in enumerate(zip(self.prepared, self._rng, strict=True)):
                self.micro = micro
                rng.restore(device)
                self.trainer.hooks.forge_micro_step(self, batch)
        self.recording = recorded
        now.restore(device)

    # -- for owners of the train step ---------------------------------------------------------------------------------

    @contextmanager
    def substitute(
        self, window: Sequence[Any], factors: Sequence[float | Tensor] | None = None, means: Means | None = None
    ) -> Iterator[None]:
        """Run on other batches: inside the `with`, these replace the window, its factors (unless None) and the means
        that count its metrics (unless None). Use it to capture a step on memory that later windows are copied to."""
        run = self.trainer
        own = self.window, self.factors, self.finished, run.means
        self.window = window
        self.factors = self.factors if factors is None else list(factors)
        run.means = run.means if means is None else means
        try:
            yield
        finally:
            self.window, self.factors, self.finished, run.means = own

    @contextmanager
    def restored_after(self, prepare_again: bool = False) -> Iterator[None]:
        """Run the window once more without a trace: afterwards the step's attributes are as before.

        `prepare_again` drops the prepared batches inside the `with`. Weights, buffers, gradients and RNG are the
        caller's to restore.
        """
        before = dict(vars(self))
        if prepare_again:
            self.prepared = None
        try:
            yield
        finally:
            vars(self).clear()
            vars(self).update(before)

    # -- for the defaults ---------------------------------------------------------------------------------------------

    def begin_turn(self, name: str | None) -> None:
        """Hand the step to one of several optimizers."""
        self.name, self.updated, self.skip_reason, self.finished = name, False, None, False
        self.prefix = "train/" if name is None else f"train/{name}/"

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the loss as it counts in its window."""
        if self.factors is not None:
            weighed = weigh_loss(loss, self.factors[self.micro])
        else:
            weighed = loss if self.divisor == 1 else loss / self.divisor
        if self.prepared is not None:
            self.loss = weighed.detach() if self.loss is None else self.loss + weighed.detach()
        return weighed

    def closure(self) -> Callable[[], Tensor]:
        """Return what a closure optimizer calls: the window again, through all gradient phases. The first call is free
        where its gradients are there already: those of the weights as they stand."""
        first, before = [self._whole_loss()], self._standing()

        def evaluate() -> Tensor:
            if first:
                loss = first.pop()
                if self._standing() == before:
                    return loss
            drop_gradients(self.optimizer)
            recorded, self.recording = self.recording, False
            self.run_window(record=False, replay=True)
            self.recording = False
            self.gradient_phases(self.trainer.hooks)
            self.recording = recorded
            return self._whole_loss()

        return evaluate

    def _standing(self) -> list[tuple[int, int]]:
        """Tell weights and gradients from changed ones, without reading them."""
        return [(writes(p), id(p.grad)) for p in self.parameters()]

    def _whole_loss(self) -> Tensor:
        """The window's loss over all ranks: a line search must decide the same on each of them."""
        assert self.loss is not None
        env = self.trainer.env
        return self.loss if env.world == 1 else env.sum(self.loss) / env.world
