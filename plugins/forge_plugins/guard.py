"""What happens when a loss or a gradient is NaN or infinite."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

import forge
from forge.checkpoint import settle
from forge.env import Env
from forge.errors import NonFiniteError, RecipeError
from forge_plugins._finite import (
    all_finite,
    bad_gradients,
    gradients,
    gradients_are_scaled,
    last_checkpoint,
    mark_bad,
    moving_buffers,
)
from forge_plugins._patterns import listed
from forge_plugins._sharded import is_distributed, local

logger = logging.getLogger("forge")

READS = {
    "skip": "policy skip must know before every update whether to make it",
    "owner": "{name!r} owns the optimizer's step, so no update can be left out on the device",
    "optimizer": "{names} cannot be told on the device to leave an update out (fused=True can, in Adam, AdamW and SGD)",
}


class Guard(forge.Plugin):
    """Keep a loss or gradient that is NaN or infinite from the weights, and from everything that is saved.

    `stop` ends the run with a NonFiniteError that says where it was and what to do. `skip` leaves the update out and
    goes on: weights, optimizer, buffers (BatchNorm's statistics) and the means in the log are as if the window had not
    been there. `rewind` goes back to the newest checkpoint and leaves the bad window out this time.

    With finite numbers nothing changes, bit for bit. On a CUDA device `stop` and `rewind` wait for nothing with fused
    optimizers: the update is made a no-op on the device, with all after it, and the host hears of it one update later,
    always before a checkpoint is written. Otherwise the device is read once per update. Gradients that a loss scaler
    owns are left to it; the loss is looked at all the same. What one of several ranks finds, all of them act upon.

    ::

        forge fit quickstart guard.policy=skip
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        policy: Literal["stop", "skip", "rewind"] = "stop"
        "What to do: stop the run, skip the update, or rewind to the newest checkpoint."
        max_skips: int = 10
        "skip: so many updates in a row may be skipped before the run is stopped after all; 0 means any number."
        leave_out: int = 1
        "rewind: how many windows to leave out, the bad one and those right before it (a spike often begins earlier)."
        max_rewinds: int = 3
        "rewind: how often one process may go back before the run is stopped after all."

    config: Config
    provides = ("guard",)

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        for name, least in (("max_skips", 0), ("leave_out", 1), ("max_rewinds", 1)):
            value = getattr(self.config, name)
            if value < least:
                raise RecipeError(f"guard.{name} is {value}; it must be at least {least}.")
        if self.config.policy != "skip":
            # nothing has to be put back, so core can run its step written out
            self.forge_train_step = None  # pyright: ignore[reportAttributeAccessIssue]
        self._flag: DeviceFlag | None = None
        self._begin()

    def _begin(self) -> None:
        """What belongs to one run."""
        self._flag = None
        self._sent: Pending | None = None
        self._told: set[str | None] = set()
        self._last: tuple[int, str | None] | None = None
        self._skipped, self._rewinds, self._bad_turn = 0, 0, False
        self._in_a_row: dict[str, int] = {}
        self._held: list[Tensor] | None = None
        self._plain: list[float] = []
        "Losses of the last update that are plain numbers, no tensors."
        self._sharded = self._together = False

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._begin()
        if trainer.verb != "fit":
            return
        self._only_loss = gradients_are_scaled(trainer)
        self._buffers = moving_buffers(trainer.task)
        self._sharded = any(map(is_distributed, trainer.task.parameters()))
        # losses differ by rank, and so do gradients that are divided; one rank alone can stop the run, but do no more
        self._together = trainer.env.world > 1 and (self._sharded or self.config.policy != "stop")
        device = trainer.env.device
        self.capturable = False
        if device.type == "cpu":
            return
        deaf = [o for o in trainer.optimizers.values() if not takes_flag(o, device)]
        owners = [call.plugin for call in trainer.stack.calls()["forge_optimizer_step"] if call.role == "own"]
        if self.config.policy != "skip" and device.type == "cuda" and not owners:
            self._told = {name for name, o in trainer.optimizers.items() if takes_flag(o, device)}
        if self._told:
            self._flag = DeviceFlag(device)
            self.capturable = self._told == set(trainer.optimizers) and not self._together
        if self.config.policy == "skip":
            logger.info("guard reads the device once per update: %s.", READS["skip"])
        elif owners:
            logger.info("guard reads the device once per update: %s.", READS["owner"].format(name=owners[0]))
        elif len(self._told) < len(trainer.optimizers):
            names = listed(sorted({type(o).__name__ for o in deaf or trainer.optimizers.values()}))
            logger.warning("guard reads the device once per update: %s.", READS["optimizer"].format(names=names))

    @forge.hookimpl
    def forge_inspect_grads(self, step: forge.Step) -> None:
        if step.name in self._told and self._flag is not None:
            self._look_later(step, self._flag)
            return
        means, loss = step.trainer.means, step.prefix + "loss"
        again, self._last = self._last == (step.index, step.name), (step.index, step.name)
        finite = means.on_host and math.isfinite(self._total(step, means.total(loss)))
        if finite and not self._in_a_row and not self._together:
            return
        bad_loss, bad_gradient = (False, False) if finite else self._look(step, loss)
        if self._together:
            bad_loss, bad_gradient = map(bool, step.trainer.env.all_max([bad_loss, bad_gradient]))
        if not bad_loss and not bad_gradient:
            self._in_a_row.pop(step.name or "", None)
            return
        self._act(step, NonFinite(step.index, step.epoch, bad_loss, self._names(step)), again)

    def _look(self, step: forge.Step, loss: str) -> tuple[bool, bool]:
        """Exactly: whether the loss, and whether a gradient, is not finite, as far as this rank has them."""
        means = step.trainer.means
        if means.on_host:
            bad_loss = not math.isfinite(means.total(loss))
        else:
            bad_loss = not all_finite(_as_tensors(means.latest(loss, len(step.window)), means.device))
        bad_gradient = not self._only_loss and (self._together or not bad_loss) and not all_finite(gradients(step))
        return bad_loss, bad_gradient

    def _names(self, step: forge.Step) -> list[str]:
        """The parameters whose gradients are not finite, on any rank."""
        names = bad_gradients(step)
        if not self._together:
            return names
        found = set().union(*step.trainer.env.gather(names))
        return [name for name, _ in step.trainer.task.named_parameters() if name in found]

    def _total(self, step: forge.Step, total: float) -> float:
        """The sum of everything there is to look at: finite where all of it is. The cheapest look, and on every update,
        so it is written out; where it is not finite, large numbers may have overflown, and an exact look follows."""
        if self._only_loss:
            return total
        if self._sharded:
            return total + sum(local(gradient).sum().item() for gradient in gradients(step))
        try:
            for group in step.optimizer.param_groups:
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if gradient is not None:
                        total += gradient.sum().item()
            return math.nan if isinstance(total, complex) else total
        except (RuntimeError, TypeError):  # sparse gradients
            return math.nan

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        """Policy skip only: a window that is skipped leaves no trace in buffers and means."""
        now: Any = [owner[name] for owner, name in self._buffers]
        if self._held is None:
            self._held = [buffer.detach().clone() for buffer in now]
        elif now:
            torch._foreach_copy_(self._held, now)
        counted, self._bad_turn = step.trainer.means.mark(), False
        result = yield
        if self._bad_turn:
            step.trainer.means.back_to(counted)
            if self._held:
                with torch.no_grad():
                    now = [owner[name] for owner, name in self._buffers]
                    torch._foreach_copy_(now, self._held)
        return result

    # -- what to do about it ------------------------------------------------------------------------------------------

    def _act(self, step: forge.Step, bad: NonFinite, again: bool = False) -> None:
        """`again`: inside a closure, where the optimizer has begun its step and it cannot be skipped any more."""
        if self.config.policy == "stop":
            raise self._error(step.trainer, bad, "" if again else "The weights are as they were before it.")
        if self.config.policy == "rewind":
            self._rewind(step, bad)
        elif again:
            raise self._error(step.trainer, bad, "It came up inside the optimizer's closure: too late to skip.")
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
            raise self._error(trainer, bad, "Policy rewind has nothing to go back to: add -p checkpoint.")
        settle()
        if not trainer.env.broadcast(last_checkpoint(trainer) is not None):
            raise self._error(trainer, bad, "There is no checkpoint to go back to yet: save more often.")
        if self._rewinds == self.config.max_rewinds:
            reason = f"The run has gone back {self._rewinds} times already (guard.max_rewinds={self._rewinds})."
            raise self._error(trainer, bad, reason)
        self._rewinds += 1
        step.skip_update(str(bad), quiet=True, by=self.name)  # the request to rewind is logged
        first = max(0, bad.index + 1 - self.config.leave_out)
        skipped = range(first, bad.index + 1)
        trainer.request_rewind(f"update {bad.index}: {bad}", skipped, everywhere=self._together, by=self.name)

    def _error(self, trainer: forge.Run, bad: NonFinite, why: str) -> NonFiniteError:
        self._sent = None  # it has been told
        saved = last_checkpoint(trainer)
        told = [f"Update {bad.index} (epoch {bad.epoch}): {bad}.", why]
        watched = any("anomaly" in plugin.provides for plugin in trainer.stack)
        if not watched:
            told.append("To see which module, operation and samples it came from, run it again with -p anomaly.")
        if saved is not None and not watched:
            told.append(f"--resume -p anomaly goes on from {saved} and meets it again, because a resume is exact.")
        if self.config.policy == "stop":
            told.append("To leave such updates out, set guard.policy=skip.")
        return NonFiniteError(" ".join(filter(None, told)))

    # -- on a CUDA device, one update late ----------------------------------------------------------------------------

    def _look_later(self, step: forge.Step, flag: DeviceFlag) -> None:
        """Have the device look, and leave the update out if it must. This may run inside a CUDA graph: what the host
        has to do comes in forge_step_end then."""
        if flag.is_heard_now() and self._sent is not None and self._sent.index != step.index:
            self._receive(step, flag)
            if step.skip_reason is not None:  # this window goes too: what it would mark is void
                return
        losses = step.trainer.means.latest(step.prefix + "loss", len(step.window))
        tensors = [loss.to(flag.value.device, non_blocking=True) for loss in losses if isinstance(loss, Tensor)]
        self._plain += [loss for loss in losses if not isinstance(loss, Tensor)]
        flag.mark(tensors, [] if self._only_loss else gradients(step))
        if self._together:
            flag.share(step.trainer.env, self._plain_loss_is_bad())
        step.optimizer.found_inf = flag.value  # pyright: ignore[reportAttributeAccessIssue]

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        if self._flag is None or step.skip_reason is not None:
            return
        self._receive(step, self._flag)
        self._sent, self._plain = Pending(step.index, step.epoch, self._plain_loss_is_bad()), []
        self._flag.send()

    def _plain_loss_is_bad(self) -> bool:
        """A loss that is a plain number never passes through the device."""
        return any(not math.isfinite(loss) for loss in self._plain)

    def _receive(self, step: forge.Step, flag: DeviceFlag) -> None:
        """Hear of the last update that was looked at, and act."""
        sent, self._sent = self._sent, None
        if sent is None or not (flag.arrived() or sent.plain_loss_is_bad):
            return
        bad = NonFinite(sent.index, sent.epoch, sent.plain_loss_is_bad or flag.loss_was_bad(), None)
        flag.clear()  # what comes now is stopped or rewound anyhow, and a restored run starts clean
        self._act(step, bad)

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run, step: forge.Step) -> None:
        if self._flag is None or self._sent is None:
            return
        # whatever is asked for, a checkpoint or an end, would act on what is not known yet; what one of several ranks
        # asks for is not granted now, and the others do not know of it
        asked = any(request.everywhere or not self._together for request in trainer.requests.open.values())
        if asked or step.ends_epoch or trainer.progress.update == trainer.max_updates:
            self._receive(step, self._flag)

    @forge.hookimpl
    def forge_state_dict(self, trainer: forge.Run) -> dict[str, Any] | None:
        if self.config.policy == "rewind" and self._flag is not None and trainer.step is not None:
            self._receive(trainer.step, self._flag)  # the Trainer goes back instead of saving
        self._refuse_unheard(trainer, "No checkpoint was written of it.")
        return {"skipped": self._skipped, "in_a_row": dict(self._in_a_row)} if self._skipped else None

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
            self._refuse_unheard(trainer, "It was the run's last update, and changed no weight.")
        finally:
            self._flag = None

    def _refuse_unheard(self, trainer: forge.Run, why: str) -> None:
        sent, flag = self._sent, self._flag
        if sent is not None and flag is not None and (flag.arrived() or sent.plain_loss_is_bad):
            bad_loss = sent.plain_loss_is_bad or flag.loss_was_bad()
            raise self._error(trainer, NonFinite(sent.index, sent.epoch, bad_loss, None), why)


@dataclass(frozen=True, slots=True)
class NonFinite:
    """What is wrong with an update. `parameters` is None where their gradients are gone by the time it is known."""

    index: int
    epoch: int
    loss: bool
    parameters: list[str] | None

    def __str__(self) -> str:
        if self.parameters is None:
            return "the loss is not finite" if self.loss else "a gradient is not finite"
        if not self.parameters:
            return "the loss is not finite"
        begin = "the loss and the gradients" if self.loss else "the loss is finite, but the gradients"
        if len(self.parameters) == 1:
            begin = begin.replace("gradients", "gradient")
        verb = "is" if len(self.parameters) == 1 and not self.loss else "are"
        return f"{begin} of {listed(self.parameters)} {verb} not finite"


@dataclass(frozen=True, slots=True)
class Pending:
    """The last update whose flag is on its way to the host."""

    index: int
    epoch: int
    plain_loss_is_bad: bool


class DeviceFlag:
    """A number on the device that becomes 1 when something is not finite, stays so, and is read without waiting; beside
    it one for the loss alone."""

    def __init__(self, device: torch.device):
        self._both = torch.zeros(2, device=device)
        self.value, self._loss = self._both[0], self._both[1]
        self._one = torch.ones((), device=device)
        self._here = torch.zeros(2, pin_memory=True)
        self._event = torch.cuda.Event()

    def mark(self, losses: list[Tensor], gradients: list[Tensor]) -> None:
        """Set the flags if any entry is NaN or infinite."""
        mark_bad([*gradients, *losses], self.value, self._one)
        mark_bad(losses, self._loss, self._one)

    def clear(self) -> None:
        """Nothing was found."""
        self._both.zero_()

    def share(self, env: Env, bad: bool) -> None:
        """Take over what any rank has found, without waiting for it."""
        if bad:
            self.value.fill_(1)
        self.value.copy_(env.sum(self.value).clamp(max=1))

    def send(self) -> None:
        """Start the copy to the host."""
        self._here.copy_(self._both, non_blocking=True)
        self._event.record()

    def is_heard_now(self) -> bool:
        """Whether this is no capture, in which nothing can be waited for."""
        return not torch.cuda.is_current_stream_capturing()

    def arrived(self) -> bool:
        """What was sent; waits for it where it must."""
        self._event.synchronize()
        return bool(self._here[0].item())

    def loss_was_bad(self) -> bool:
        """Of what has arrived: whether it was the loss."""
        return bool(self._here[1].item())


def takes_flag(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether an optimizer leaves its update out where `found_inf` says so, on the device, as torch's fused ones do."""
    groups = optimizer.param_groups
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and "grad_scaler" not in inspect.signature(optimizer.step).parameters
        and all(group.get("fused") for group in groups)
        and all(parameter.device == device for group in groups for parameter in group["params"])
    )


def _as_tensors(losses: list[Tensor | float], device: torch.device) -> list[Tensor]:
    return [loss if isinstance(loss, Tensor) else torch.tensor(loss, device=device) for loss in losses]
