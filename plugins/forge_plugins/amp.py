"""Mixed precision."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import forge
from forge.env import Env, pick_device
from forge.errors import NonFiniteError, RecipeError, StackError, TaskError
from forge.util.patterns import listed

logger = logging.getLogger("forge")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALING = ("forge_backward", "forge_finalize_grads", "forge_optimizer_step", "forge_step_end")
"""The hooks of the loss scaler, used by fp16 only."""
SLOW = {
    ("cuda", "bf16"): "this device has no bf16 and emulates it, which is slow. Use amp.dtype=fp16.",
    ("cpu", "fp16"): "few CPUs compute in fp16: it is likely to be slow. bf16 needs no loss scale either.",
}
"""Warnings about a dtype that is not the best one of its device."""
HOPELESS = (
    "Gradients overflow at any loss scale: they are NaN or infinite before scaling, or activations exceed 65504, the "
    "largest number in fp16. Use amp.dtype=bf16, where guard and anomaly check the gradients too, or a lower learning "
    "rate."
)


class AMP(forge.Plugin):
    """Run every forward pass in bfloat16 or float16, while weights, gradients and optimizer stay in float32.

    The task's step runs under `torch.autocast`, in training and in evaluation, bit for bit as if you had written it
    yourself: matrix products and convolutions in the short type, losses and normalisations in float32. Outputs of
    `predict` keep the type that autocast gave them.

    When to use it: on any recent GPU. `auto` uses bf16 if the device supports it, else fp16, and logs its choice. A CPU
    without bf16 instructions (AMX, AVX512_BF16) is slower in bf16 than in float32, and nearly every CPU is slow in
    fp16.

    bf16 needs nothing else and never waits for the device. fp16 overflows above 65504 and loses values below 6e-8, so
    the loss is scaled before the backward pass (torch's GradScaler, one for all optimizers), and gradients are unscaled
    before other plugins read them. An update whose gradients overflow is skipped, for schedules and averages too, and
    the scale is halved; this is normal in the first updates. Deciding whether to skip costs one read of the device per
    update. The scale is saved with the run and restored by a rewind.

    What you see: with fp16, `amp/scale` and `amp/skipped` in the log. A scale below 1 gives a warning, because then the
    scale is not the cause of the overflow.

    Together with: `clip` clips the unscaled gradients. `cuda_graph` captures forward and backward; in fp16 the rest of
    the update runs outside of the graph. fp16 is refused with `fsdp` and `sam`, with optimizers that take a closure,
    and for tasks that are in float16 themselves.

    ::

        forge fit quickstart -p amp task.hidden=32 trainer.max_epochs=3
        forge fit quickstart -p amp amp.dtype=fp16 amp.init_scale=1024 task.hidden=32 trainer.max_epochs=3
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        dtype: Literal["auto", "bf16", "fp16"] = "auto"
        "Type of forwards; auto is bf16 where the device supports it, else fp16."
        init_scale: float = 2.0**16
        "fp16: the first factor of the loss."
        growth_interval: int = 2000
        "fp16: updates in a row without overflow after which the scale is doubled."

    config: Config
    provides = ("autocast",)
    cures = {
        "memory": "-p {name}, for activations in half precision",
        "compute": "-p {name}, for products in half precision",
        "dtypes": "-p {name}",
    }

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        if not 0 < self.config.init_scale < math.inf:
            raise RecipeError(f"amp.init_scale is {self.config.init_scale:g}; it must be a number above 0.")
        if self.config.growth_interval < 1:
            raise RecipeError(f"amp.growth_interval is {self.config.growth_interval}; it must be at least 1.")
        self.scaler: GradScaler | None = None
        "fp16: the loss scaler of the run, for a task that computes gradients itself."
        self._begin()
        self._take("fp16" if self.config.dtype == "fp16" else "bf16")

    def _begin(self) -> None:
        """Reset the state of one run."""
        self.scaler = None
        self._skipped, self._overflowed, self._warned = 0, False, False

    def _take(self, dtype: str) -> None:
        """Choose the dtype, and with it the hooks of this instance: bf16 owns none of the scaler's."""
        self.dtype = dtype
        self.capturable = dtype == "bf16" or "window"
        self.provides = ("autocast", "grad_scaler") if dtype == "fp16" else ("autocast",)
        for hook in SCALING:
            if dtype == "fp16":
                self.__dict__.pop(hook, None)
            else:
                setattr(self, hook, None)

    @classmethod
    def for_plan(cls, given: Mapping[str, Any], task: nn.Module | None) -> Mapping[str, Any]:
        """bf16 stands for either short type, because fp16 reads values."""
        return {"dtype": "bf16"}

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        """Resolve `auto` by the device to come: ownership cannot change later."""
        if self.config.dtype == "auto":
            self._take(best_dtype(pick_device(trainer.device)))

    @forge.hookimpl(wrapper=True)
    def forge_setup_env(self, trainer: forge.Run) -> Generator[None, Env, Env]:
        """Set up autocast this early because other plugins may run the model when they start."""
        env = yield
        device = env.device
        env.computes_in[self.name] = self.dtype
        self._begin()
        self._kind, self._another = device.type, partial(torch.autocast, device.type, DTYPES[self.dtype])
        self._autocast = self._another()  # making one costs as much as entering it
        if self.dtype == "fp16" and trainer.verb == "fit":
            options = {"init_scale": self.config.init_scale, "growth_interval": self.config.growth_interval}
            self.scaler = GradScaler(device.type, **options)
            self.scaler.scale(torch.zeros((), device=device))  # creates the scaler's state
        return env

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        if self.scaler is not None:
            self._refuse_what_cannot_be_unscaled(trainer)
        self._log_setup(trainer)

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        if self._skipped and self.scaler is not None:
            many = f"{self._skipped} update{'s' if self._skipped > 1 else ''}"
            logger.info("amp: %s skipped in this run; the loss scale is %.10g now.", many, self.scaler.get_scale())
        self._begin()
        if self.config.dtype == "auto":
            self._take("bf16")  # the next run may be on another device

    # -- forward ------------------------------------------------------------------------------------------------------

    @forge.hookimpl(wrapper=True)
    def forge_forward(self) -> Generator[None, Any, Any]:
        # an autocast entered within itself would forget the outer state
        with self._another() if torch.is_autocast_enabled(self._kind) else self._autocast:
            return (yield)

    # -- fp16: backward, gradients, step ------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_backward(self, loss: Tensor) -> bool:
        self.scaler.scale(loss).backward()  # pyright: ignore[reportOptionalMemberAccess]
        return True

    @forge.hookimpl
    def forge_finalize_grads(self, step: forge.Step) -> None:
        scaler, optimizer = self.scaler, step.optimizer
        assert scaler is not None
        scaler.unscale_(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        if not found:  # no gradients at all: the scaler must not count this update
            del scaler._per_optimizer_states[id(optimizer)]
        elif any(flag.item() for flag in found.values()):
            self._skipped, self._overflowed = self._skipped + 1, True
            reason = f"gradients overflow with the loss scaled by {scaler.get_scale():.10g}, which is halved"
            step.skip_update(reason, by=self.name)

    @forge.hookimpl
    def forge_optimizer_step(self, step: forge.Step) -> bool:
        # not the scaler's step: it would read the device again, and forge_finalize_grads has found no overflow
        step.optimizer.step()
        return True

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        scaler = self.scaler
        assert scaler is not None
        if scaler._per_optimizer_states:  # empty after a skipped window
            scaler.update()
            if self._overflowed:
                self._overflowed = False
                self._warn_if_hopeless(scaler.get_scale(), step)
        if step.ends_interval:
            step.record("amp/scale", scaler.scale(torch.ones((), device=step.trainer.env.device)))
            step.record("amp/skipped", self._skipped)

    def _warn_if_hopeless(self, scale: float, step: forge.Step) -> None:
        """Warn at a scale below 1: it makes gradients smaller, so an overflow was not caused by the scale."""
        if scale >= 1:
            self._warned = False
            return
        if scale == 0:
            raise NonFiniteError(f"Update {step.index}: the loss scale has fallen to 0. {HOPELESS}")
        if not self._warned:
            logger.warning("amp: the loss scale has fallen to %g at update %d. %s", scale, step.index, HOPELESS)
            self._warned = True

    # -- state --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        if self.scaler is None:
            return {"dtype": self.dtype}
        scaler = self.scaler.state_dict()
        kept = {"scale": scaler["scale"], "growth_tracker": scaler["_growth_tracker"], "skipped": self._skipped}
        return {"dtype": self.dtype, **kept}

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        # the Trainer reports a change of the option itself
        if self.config.dtype == "auto" and state["dtype"] != self.dtype:
            logger.warning("amp: the run was in %s; auto is %s on this device.", state["dtype"], self.dtype)
        if self.scaler is None or "scale" not in state:
            return
        own = self.scaler.state_dict()  # keep the options of this run
        self.scaler.load_state_dict({**own, "scale": state["scale"], "_growth_tracker": state["growth_tracker"]})
        self._skipped = state["skipped"]

    # -- messages and refusals ----------------------------------------------------------------------------------------

    def _log_setup(self, trainer: forge.Run) -> None:
        device = trainer.env.device
        took = f"{self.dtype} (auto)" if self.config.dtype == "auto" else self.dtype
        kept = sorted({_name(p.dtype) for p in trainer.task.parameters() if p.is_floating_point()})
        text = "amp: matrix products and convolutions run in %s (autocast on %s), losses and normalisations in "
        logger.info(text + "float32; weights and gradients are %s.", took, device, ", ".join(kept))
        if (device.type, self.dtype) in SLOW and best_dtype(device) != self.dtype:
            logger.warning("amp: %s", SLOW[device.type, self.dtype])
        if self.scaler is None:
            return
        text = "amp: the loss scale starts at %.10g; updates are skipped until no gradient overflows."
        logger.info(text, self.config.init_scale)
        if device.type != "cpu":
            logger.info("amp reads the device once per update, to skip those whose gradients overflow; bf16 does not.")

    def _refuse_what_cannot_be_unscaled(self, trainer: forge.Run) -> None:
        for entry in trainer.optimizers.entries.values():
            if entry.needs_closure:
                raise StackError(
                    f"amp in fp16 cannot train with {type(entry.optimizer).__name__}, which computes the loss several "
                    "times per step, while gradients are unscaled only once. Use amp.dtype=bf16 or another optimizer."
                )
        named = trainer.task.named_parameters()
        halves = [name for name, p in named if p.requires_grad and p.dtype is torch.float16]
        if halves:
            raise TaskError(
                f"amp in fp16: the weights of {listed(halves)} are float16, so their scaled gradients could not "
                "be unscaled. Keep the task in float32 (no .half()); amp runs its forward in float16."
            )


def best_dtype(device: torch.device) -> str:
    """Return bf16 if the device supports it; emulated bf16 is slower than float32."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if device.type == "cpu" else "fp16"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
