"""Protection from losses, gradients and weights that are NaN or infinite."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

import forge
from forge.checkpoint import wait_until_written
from forge.env import Env
from forge.errors import NonFiniteError, RecipeError
from forge.optim.sharded import is_distributed, local
from forge.snapshot.finite import HALF, is_half, may_be_infinite
from forge.snapshot.non_finite import (
    FiniteCheck,
    all_finite,
    bad_gradients,
    bad_weights,
    gradients,
    gradients_are_scaled,
    last_checkpoint,
    mark_bad,
    moving_buffers,
    trained_weights,
)
from forge.torch_internals import foreach_copy_
from forge.util.patterns import listed

logger = logging.getLogger("forge")

LOOK_EVERY = 16
"""The weights are looked at in every such update."""
READ_EVERY = 16
"""Updates whose flag is read at once, on a CUDA device."""


class Guard(forge.Plugin):
    """Protect weights and checkpoints from a loss or gradient that is NaN or infinite.

    `stop` ends the run with a NonFiniteError that names the update and the next steps. `skip` skips the update and
    continues: weights, optimizer, buffers (BatchNorm's statistics) and logged means are as if the window had not
    existed. `rewind` goes back to the newest checkpoint and skips the bad window this time.

    An optimizer can make weights non-finite from finite gradients (Adam in float16 does). So the weights are looked at
    too: in every 16th update, whenever a loss or gradient is not finite, and before anything is saved. Such a step
    cannot be skipped any more: `skip` stops the run, as `stop` does, and `rewind` goes back. What held an infinity when
    the run began, such as a mask of -inf, may hold it.

    With finite numbers the run is bit for bit unchanged. On a CUDA device with fused optimizers, `stop` and `rewind`
    never wait: the bad update and all after it become no-ops on the device. The host reads of it every 16 updates, and
    always before a log, a validation or a checkpoint, and names the update. Otherwise the device is read once per
    update. Gradients that a loss scaler owns are left to the scaler; the loss is checked anyway. A finding of one rank
    is acted upon by all.

    ::

        forge fit quickstart guard.policy=skip
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        policy: Literal["stop", "skip", "rewind"] = "stop"
        "Stop the run, skip the update, or rewind to the newest checkpoint."
        max_skips: int = 10
        "skip: updates in a row that may be skipped before the run stops; 0: any number."
        leave_out: int = 1
        "rewind: windows to skip: the bad one and those right before it (a spike often begins earlier)."
        max_rewinds: int = 3
        "rewind: rewinds of one process before the run stops."

    config: Config
    provides = ("guard",)
    cures = {"non_finite": "-p {name} stops at the update that causes it."}
    example = {}

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        for name, least in (("max_skips", 0), ("leave_out", 1), ("max_rewinds", 1)):
            value = getattr(self.config, name)
            if value < least:
                raise RecipeError(f"guard.{name} is {value}; it must be at least {least}.")
        if self.config.policy != "skip":
            # nothing has to be restored, so the wrapper is not needed
            self.forge_train_step = None  # pyright: ignore[reportAttributeAccessIssue]
        self._flag: DeviceFlag | None = None
        self._begin()

    def _begin(self) -> None:
        """Reset the state of one run."""
        self._flag, self._all_finite = None, all_finite
        self._unread: list[Checked] = []
        "Updates since the host last read the flag."
        self._sent = False
        "Whether the flag of the updates up to the last one is on its way to the host."
        self._losses: list[Tensor | float] | None = None
        "The losses of the unread updates, once their means are read; before, the means have them."
        self._marks: dict[str | None, int] = {}
        "Checks of the update under way, by optimizer."
        self._captured: set[str | None] = set()
        "Optimizers whose check is part of a graph: it is made once in a replay, where no hook is called."
        self._on_device: set[str | None] = set()
        "Optimizers that skip an update on the device."
        self._last: tuple[int, str | None] | None = None
        self._skipped, self._rewinds, self._bad_turn = 0, 0, False
        self._in_a_row: dict[str, int] = {}
        self._held: list[Tensor] | None = None
        self._plain: list[float] = []
        "Losses of the last update that are plain numbers, not tensors."
        self._sharded = self._together = False
        self._may_be_infinite: set[int] | None = None
        "Parameters, by id, that held an infinity when the run began; None before the first update."

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._begin()
        if trainer.verb == "fit":
            self._prepare(trainer)
        if self._flag is None:
            trainer.switch_hooks(self, "forge_step_end", "forge_boundary", "forge_evaluate", on=False)

    def _prepare(self, trainer: forge.Run) -> None:
        """Decide how the updates of a fit are checked."""
        self._only_loss = gradients_are_scaled(trainer)
        self._buffers = moving_buffers(trainer.task)
        self._sharded = any(map(is_distributed, trainer.task.parameters()))
        # losses and divided gradients differ by rank; one rank alone can only stop the run
        divided = self._sharded or trainer.env.parts is not None
        self._together = trainer.env.world > 1 and (divided or self.config.policy != "stop")
        device = trainer.env.device
        self.capturable = False
        if device.type == "cpu":
            return
        if device.type == "cuda":
            self._all_finite = FiniteCheck(device)
        owners = [call.plugin for call in trainer.stack.calls()["forge_optimizer_step"] if call.role == "own"]
        watched = any("anomaly" in plugin.provides for plugin in trainer.stack)
        if self.config.policy != "skip" and device.type == "cuda" and not owners and not watched:
            self._on_device = {name for name, o in trainer.optimizers.items() if takes_flag(o, device)}
        if self._on_device:
            self._flag = DeviceFlag(device)
            self.capturable = self._on_device == set(trainer.optimizers) and not self._together
        why, level = "", logging.INFO
        if self.config.policy == "skip":
            why = "policy skip must decide before every update"
        elif watched:
            why = "anomaly looks at every update before its step"
        elif owners:
            why = f"{owners[0]!r} owns the optimizer step, so no update can be skipped on the device"
        elif len(self._on_device) < len(trainer.optimizers):
            optimizers = trainer.optimizers.values()
            unfit = [optimizer for optimizer in optimizers if not takes_flag(optimizer, device)]
            names = listed(sorted({type(optimizer).__name__ for optimizer in unfit or optimizers}))
            why = f"{names} cannot skip an update on the device (Adam, AdamW and SGD can with fused=True)"
            level = logging.WARNING
        if why:
            logger.log(level, "guard reads the device once per update: %s.", why)

    @forge.hookimpl
    def forge_inspect_grads(self, step: forge.Step) -> None:
        if self._may_be_infinite is None:
            named = step.trainer.task.named_parameters()
            self._may_be_infinite = {id(p) for name, p in named if may_be_infinite(step.trainer.task, name)}
        if step.name in self._on_device and self._flag is not None:
            self._mark(step, self._flag)
            return
        means, loss = step.trainer.means, step.prefix + "loss"
        again, self._last = self._last == (step.index, step.name), (step.index, step.name)
        finite = means.on_host and math.isfinite(self._total(step, means.total(loss)))
        if finite and not self._in_a_row and not self._together:
            return
        bad_loss, bad_gradient, bad_weight = (False, False, False) if finite else self._check(step, loss)
        if self._together:
            bad = step.trainer.env.all_max([bad_loss, bad_gradient, bad_weight])
            bad_loss, bad_gradient, bad_weight = map(bool, bad)
        if not bad_loss and not bad_gradient and not bad_weight:
            self._in_a_row.pop(step.name or "", None)
            return
        weights = self._on_all_ranks(step.trainer, bad_weights(step.trainer.task))
        if weights:
            self._act(step, NonFinite(step.index - 1, step.epoch, weights=weights))
        elif bad_loss or bad_gradient:
            names = self._on_all_ranks(step.trainer, bad_gradients(step))
            self._act(step, NonFinite(step.index, step.epoch, bad_loss, names), again)

    def _check(self, step: forge.Step, loss: str) -> tuple[bool, bool, bool]:
        """Return exactly whether the loss, and whether a gradient or a weight of this rank, is not finite."""
        means = step.trainer.means
        found = [] if self._only_loss else gradients(step)
        if means.on_host:
            bad_loss = not math.isfinite(means.total(loss))
        else:
            losses = _as_tensors(means.latest(loss, len(step.window)), means.device)
            looked_at = [] if step.index % LOOK_EVERY else self._weights(step)
            if self._all_finite([*losses, *found, *looked_at]):  # read at once
                return False, False, False
            bad_loss = not self._all_finite(losses)
        if bad_loss and not self._together:
            return True, False, False
        return bad_loss, not self._all_finite(found), not self._all_finite(self._weights(step))

    def _weights(self, step: forge.Step) -> list[Tensor]:
        """Return the weights to look at, as the last update left them."""
        return trained_weights(step, self._may_be_infinite or ())

    def _on_all_ranks(self, trainer: forge.Run, names: list[str]) -> list[str]:
        """Return the parameters that any rank names."""
        if not self._together:
            return names
        found = set().union(*trainer.env.gather(names))
        return [name for name, _ in trainer.task.named_parameters() if name in found]

    def _total(self, step: forge.Step, total: float) -> float:
        """Return the sum of loss and gradients, and at times the weights, finite if all of them are: the cheapest
        check, made on every update. If it is not finite, large numbers may have overflowed, and an exact check
        follows."""
        try:
            if step.index % LOOK_EVERY == 0:
                for weight in self._weights(step):
                    total += (local(weight) if self._sharded else weight).sum().item()
            if self._only_loss:
                return total
            if self._sharded:
                return total + sum(local(gradient).sum().item() for gradient in gradients(step))
            for group in step.trainer.optimizers.entries[step.name].optimizer.param_groups:
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if gradient is not None:
                        total += gradient.sum().item()
            return math.nan if isinstance(total, complex) else total
        except (RuntimeError, TypeError):  # sparse gradients
            return math.nan

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        """Policy skip only: restore buffers and means after a skipped window."""
        now: Any = [owner[name] for owner, name in self._buffers]
        if self._held is None:
            self._held = [buffer.detach().clone() for buffer in now]
        elif now:
            foreach_copy_(self._held, now)
        counted, self._bad_turn = step.trainer.means.savepoint(), False
        result = yield
        if self._bad_turn:
            step.trainer.means.rollback(counted)
            if self._held:
                with torch.no_grad():
                    now = [owner[name] for owner, name in self._buffers]
                    foreach_copy_(now, self._held)
        return result

    # -- policies -----------------------------------------------------------------------------------------------------

    def _act(self, step: forge.Step, bad: NonFinite, again: bool = False) -> None:
        """Apply the policy. `again`: inside a closure, where the step has begun and cannot be skipped any more."""
        if self.config.policy == "rewind":
            self._rewind(step, bad)
        elif bad.weights:
            raise self._error(step.trainer, bad)
        elif self.config.policy == "stop":
            raise self._error(step.trainer, bad, "" if again else "The weights are unchanged.")
        elif again:
            why = "It happened inside the optimizer's closure, where an update cannot be skipped."
            raise self._error(step.trainer, bad, why)
        else:
            self._skip(step, bad)

    def _skip(self, step: forge.Step, bad: NonFinite) -> None:
        in_a_row = self._in_a_row[step.name or ""] = self._in_a_row.get(step.name or "", 0) + 1
        if self.config.max_skips and in_a_row > self.config.max_skips:
            reason = f"It is number {in_a_row} in a row, more than guard.max_skips={self.config.max_skips}."
            raise self._error(step.trainer, bad, reason)
        self._skipped, self._bad_turn = self._skipped + 1, True
        logger.warning("guard skips update %d: %s.", bad.index, bad)
        step.skip_update(str(bad), quiet=True, by=self.name)

    def _rewind(self, step: forge.Step, bad: NonFinite) -> None:
        trainer = step.trainer
        if trainer.hooks.forge_save is None:
            raise self._error(trainer, bad, "Policy rewind needs checkpoints: add -p checkpoint.")
        wait_until_written()
        if not trainer.env.broadcast(last_checkpoint(trainer) is not None):
            raise self._error(trainer, bad, "No checkpoint exists yet to rewind to: save more often.")
        if self._rewinds == self.config.max_rewinds:
            reason = f"The run has been rewound {self._rewinds} times already (guard.max_rewinds={self._rewinds})."
            raise self._error(trainer, bad, reason)
        self._rewinds += 1
        step.skip_update(str(bad), quiet=True, by=self.name)  # the request to rewind is logged
        first = max(0, bad.index + 1 - self.config.leave_out)
        skipped = range(first, bad.index + 1)
        trainer.request_rewind(f"update {bad.index}: {bad}", skipped, everywhere=self._together, by=self.name)

    def _error(self, trainer: forge.Run, bad: NonFinite, why: str = "") -> NonFiniteError:
        self._unread = []  # it is being reported
        saved = last_checkpoint(trainer)
        if bad.weights:
            when = f"After update {bad.index}" if bad.index >= 0 else "Before the first update"
            text = [f"{when}: {bad}.", why, f"The last good checkpoint is {saved}." if saved is not None else ""]
            text += [HALF] if is_half(trainer.task, bad.weights) else []
            return NonFiniteError(" ".join(filter(None, text)))
        text = [f"Update {bad.index} (epoch {bad.epoch}): {bad}.", why]
        watched = any("anomaly" in plugin.provides for plugin in trainer.stack)
        if not watched:
            text.append("To see which module, operation and samples it came from, run again with -p anomaly.")
        if saved is not None and not watched:
            text.append(f"--resume -p anomaly continues from {saved} and reproduces it, because a resume is exact.")
        if self.config.policy == "stop":
            text.append("To skip such updates, set guard.policy=skip.")
        return NonFiniteError(" ".join(filter(None, text)))

    # -- on a CUDA device, some updates later -------------------------------------------------------------------------

    def _mark(self, step: forge.Step, flag: DeviceFlag) -> None:
        """Let the device check, and skip the update if needed. This may run inside a CUDA graph; the host's part then
        follows in forge_step_end."""
        captured = flag.is_captured()
        losses = step.trainer.means.latest(step.prefix + "loss", len(step.window))
        tensors = [flag.here(loss) for loss in losses if isinstance(loss, Tensor)]
        self._plain += [loss for loss in losses if not isinstance(loss, Tensor)]
        if not self._only_loss:
            tensors += gradients(step)
        if captured or step.index % LOOK_EVERY == 0:
            tensors += self._weights(step)
        flag.mark(tensors)
        if self._together:
            flag.share(step.trainer.env, self._plain_loss_is_bad())
        flag.count()
        if captured:
            self._captured.add(step.name)
        else:
            self._marks[step.name] = self._marks.get(step.name, 0) + 1
        step.optimizer.found_inf = flag.value  # pyright: ignore[reportAttributeAccessIssue]

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        flag = self._flag
        if flag is None:
            return
        if self._sent:
            self._receive(step, flag, newer=len(step.window))
        counted, self._marks = self._marks, {}
        stepped = step.updated_names if step.trainer.optimizers.named else (None,) if step.updated else ()
        marks = sum(counted.values()) + sum(n in self._captured and n not in counted for n in stepped)
        if marks == 0:
            return
        self._unread.append(Checked(step.index, step.epoch, marks, len(step.window)))
        bad, self._plain = self._plain_loss_is_bad(), []
        if bad:
            self._read(step, flag, bad)
            return
        logs = step.trainer.progress.update % step.trainer.log_every == 0 or step.ends_epoch
        if logs or len(self._unread) >= READ_EVERY:
            flag.send()
            self._sent = True
            # the means are about to be read, and forget what they have
            self._losses = self._latest_losses(step.trainer) if logs else None

    def _plain_loss_is_bad(self) -> bool:
        """Check losses that are plain numbers: they never pass through the device."""
        return any(not math.isfinite(loss) for loss in self._plain)

    def _latest_losses(self, trainer: forge.Run, newer: int = 0) -> list[Tensor | float]:
        """Return the losses of the unread updates, as far as the means have them; they have `newer` ones too."""
        count = sum(checked.micro for checked in self._unread) + newer
        names = [f"{name}/loss" for name in trainer.optimizers if name is not None] or ["loss"]
        found = [trainer.means.latest("train/" + name, count) for name in names]
        return [loss for losses in found for loss in losses[: len(losses) - newer]]

    def _read(self, step: forge.Step, flag: DeviceFlag, plain_loss_is_bad: bool = False) -> None:
        """Read the flag of all updates so far now, and act on it."""
        if self._unread:
            flag.send()
            self._receive(step, flag, plain_loss_is_bad)

    def _receive(self, step: forge.Step, flag: DeviceFlag, plain_loss_is_bad: bool = False, newer: int = 0) -> None:
        """Read the flag that was sent, `newer` micro-batches ago, and act on it."""
        bad = self._finding(step.trainer, flag, plain_loss_is_bad, newer)
        self._unread, self._losses, self._sent = [], None, False
        if bad is not None:
            flag.clear()  # what follows is stopped or rewound anyway, and a restored run starts with a clean flag
            self._act(step, bad)

    def _finding(
        self, trainer: forge.Run, flag: DeviceFlag, plain_loss_is_bad: bool = False, newer: int = 0
    ) -> NonFinite | None:
        """Return what set the flag that was sent; the weights have not changed since."""
        count = flag.arrived()
        if not count and not plain_loss_is_bad:
            return None
        first = self._unread[-1]
        for checked in reversed(self._unread):
            if count <= 0:
                break
            first, count = checked, count - checked.marks
        weights = self._on_all_ranks(trainer, bad_weights(trainer.task))
        if weights:
            return NonFinite(first.index - 1, first.epoch, weights=weights)
        losses = self._latest_losses(trainer, newer) if self._losses is None else self._losses
        after = sum(checked.micro for checked in self._unread if checked.index > first.index)
        own = losses[: len(losses) - after][-first.micro :] if len(trainer.optimizers) == 1 else losses
        bad_loss = not all_finite(_as_tensors(own, trainer.env.device))
        return NonFinite(first.index, first.epoch, plain_loss_is_bad or bad_loss, None)

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run, step: forge.Step) -> None:
        if self._flag is None or not self._unread:
            return
        # a requested checkpoint or stop must not act on an unknown result; a request of one of several ranks is not
        # granted now, and the others do not know of it
        asked = any(request.everywhere or not self._together for request in trainer.requests.open.values())
        if asked or step.ends_epoch or trainer.progress.update == trainer.max_updates:
            self._read(step, self._flag)

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self, trainer: forge.Run) -> Generator[None, Any, Any]:
        if self._flag is not None and trainer.step is not None:
            self._read(trainer.step, self._flag)
        return (yield)

    @forge.hookimpl
    def forge_state_dict(self, trainer: forge.Run) -> dict[str, Any] | None:
        if self.config.policy == "rewind" and self._flag is not None and trainer.step is not None:
            self._read(trainer.step, self._flag)  # the Trainer goes back instead of saving
        self._raise_unread(trainer, "No checkpoint of it was written.")
        if "rewind" not in trainer.requests.open:
            self._look_at_all_weights(trainer)
        return {"skipped": self._skipped, "in_a_row": dict(self._in_a_row)} if self._skipped else None

    def _look_at_all_weights(self, trainer: forge.Run) -> None:
        """Look at the weights that the last update left, before they are saved."""
        names = bad_weights(trainer.task)
        if trainer.env.world > 1 and trainer.env.all_max([len(names)])[0]:
            names = sorted(set().union(*trainer.env.gather(names)))
        if not names:
            return
        bad = NonFinite(trainer.progress.update - 1, trainer.progress.epoch, weights=names)
        if self.config.policy != "rewind" or trainer.step is None:
            raise self._error(trainer, bad, "No checkpoint of it was written.")
        self._rewind(trainer.step, bad)

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        self._skipped, self._in_a_row = state["skipped"], dict(state["in_a_row"])

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        if self._skipped:
            logger.warning("guard: %d update%s skipped in this run.", self._skipped, "s" if self._skipped > 1 else "")
        if self._flag is None:
            return
        for optimizer in trainer.optimizers.values():
            if getattr(optimizer, "found_inf", None) is self._flag.value:
                del optimizer.found_inf  # pyright: ignore[reportAttributeAccessIssue]
        try:
            self._raise_unread(trainer, "It was the run's last update, and changed no weight.")
        finally:
            self._flag = None

    def _raise_unread(self, trainer: forge.Run, why: str) -> None:
        flag = self._flag
        if flag is None or not self._unread:
            return
        flag.send()
        bad = self._finding(trainer, flag)
        self._unread, self._losses, self._sent = [], None, False
        if bad is not None:
            raise self._error(trainer, bad, why)


@dataclass(frozen=True, slots=True)
class NonFinite:
    """What is not finite in an update: its loss, gradients, or the weights after it."""

    index: int
    epoch: int
    loss: bool = False
    gradients: list[str] | None = None
    "None if they are gone by the time it is known."
    weights: Sequence[str] = ()
    "Parameters that are not finite after the update, although its loss and gradients were."

    def __str__(self) -> str:
        names = self.weights or self.gradients or ()
        verb = "is" if len(names) == 1 and not self.loss else "are"
        if self.weights:
            why = "" if self.index < 0 else ": the optimizer's step made them so from finite gradients"
            return f"{listed(self.weights)} {verb} not finite{why}"
        if not names:
            return "a gradient is not finite" if self.gradients is None and not self.loss else "the loss is not finite"
        whose = f"gradient{'s'[: len(names) > 1]} of {listed(names)} {verb} not finite"
        return f"the loss and the {whose}" if self.loss else f"the loss is finite, but the {whose}"


@dataclass(frozen=True, slots=True)
class Checked:
    """An update that the device has checked: how often (once per optimizer), and over how many micro-batches."""

    index: int
    epoch: int
    marks: int
    micro: int


class DeviceFlag:
    """A number on the device that becomes 1 when something is not finite, and stays 1, and the number of checks since
    then. The host reads the count without waiting for what follows."""

    def __init__(self, device: torch.device):
        self._both = torch.zeros(2, device=device)
        self.value, self._count = self._both[0], self._both[1]
        self._one = torch.ones((), device=device)
        self._sent = torch.zeros((), pin_memory=True)
        self._event = torch.cuda.Event()

    def here(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the flag's device."""
        return tensor if tensor.device == self.value.device else tensor.to(self.value.device, non_blocking=True)

    def mark(self, tensors: list[Tensor]) -> None:
        """Set the flag if any entry is NaN or infinite."""
        mark_bad(tensors, self.value, self._one)

    def count(self) -> None:
        """Count this check if the flag is set."""
        self._count.add_(self.value)

    def clear(self) -> None:
        """Reset flag and count."""
        self._both.zero_()

    def share(self, env: Env, bad: bool) -> None:
        """Combine the flags of all ranks, without waiting."""
        if bad:
            self.value.fill_(1)
        self.value.copy_(env.sum(self.value).clamp(max=1))

    def send(self) -> None:
        """Start the copy to the host."""
        self._sent.copy_(self._count, non_blocking=True)
        self._event.record()

    def is_captured(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def arrived(self) -> int:
        """Return the count that was sent; wait for the copy if needed."""
        self._event.synchronize()
        return int(self._sent.item())


def takes_flag(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether an optimizer skips its update on the device if `found_inf` is set, as torch's fused ones do."""
    groups = optimizer.param_groups
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and "grad_scaler" not in inspect.signature(optimizer.step).parameters
        and all(group.get("fused") for group in groups)
        and all(parameter.device == device for group in groups for parameter in group["params"])
    )


def _as_tensors(losses: list[Tensor | float], device: torch.device) -> list[Tensor]:
    return [loss if isinstance(loss, Tensor) else torch.tensor(loss, device=device) for loss in losses]
