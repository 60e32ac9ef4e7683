"""Faster kernels in place of torch's functions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

import forge
from forge.contract.task import Build
from forge.diagnose.checks import LossWatch
from forge.errors import ForgeError, RecipeError, did_you_mean
from forge.snapshot.sandbox import without_side_effects
from forge_kernels import discovery, patch
from forge_kernels.contract import INTERPRETED, Kernel
from forge_kernels.torch_internals import build_dynamo_table

logger = logging.getLogger("forge")

AUTO, ALL = "auto", "all"
LEAST_GAIN = 0.02
"""The least share of the step's time that kernels must save."""
ROUNDING = 0.01
"""How far the loss with kernels may be from the loss without, relative to it."""


class Kernels(forge.Plugin):
    """Run forge's kernels in place of torch's functions.

    The code of the task does not change. While it trains or evaluates, functions such as
    `torch.nn.functional.layer_norm` are replaced by a kernel, for `F.layer_norm` and `nn.LayerNorm` alike, but not for
    a name that was imported directly (`from torch.nn.functional import layer_norm`). A kernel takes the calls that it
    supports; others run as written. Between updates, and at the end of the run, torch's own functions are restored.

    forge has `attention` (in place of `scaled_dot_product_attention`), `cross_entropy`, `layer_norm`, `rms_norm` and
    `softmax`; other packages add theirs. Call `forge.kernels.matmul`, `mlp` and `linear_cross_entropy` in your task:
    they stand for several functions of torch.

    When to use it: on CUDA, for models that are limited by memory traffic. On other devices nothing is replaced, the
    run is bit for bit the same, and the log says so.

    `use` names kernels, or is `all`. With `auto`, one measurement decides: forward and backward of the first batch are
    timed with all kernels and without, without effect on the run, and the kernels are used if the whole step is at
    least 2 % faster and has the same loss. A resumed run uses the same kernels, because others would round differently.
    A step that is compiled, or runs on several ranks, is not measured, and runs as written: name kernels there.
    torch.compile fuses norms, softmax and losses with what is around them, so name only what it does not fuse
    (`attention`).

    What you see: the kernels in use, and the step's time with and without.

    ::

        forge fit quickstart -p kernels
        forge fit quickstart -p kernels kernels.use=cross_entropy
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        use: str | list[str] = AUTO
        "Which kernels: names, all, or auto (all, if the first batch is faster with them)."

    config: Config
    provides = ("kernels",)
    capturable = True

    def __init__(self, *first: str | list[str], **values: Any):
        super().__init__(*first, **values)
        use, known = self.config.use, discovery.names()
        if use == []:
            raise RecipeError("kernels.use is an empty list. Name some kernels, or write auto or all.")
        self._named = [] if use in (AUTO, ALL) else [use] if isinstance(use, str) else use
        for name in self._named:
            if name not in known:
                raise RecipeError(
                    f"kernels.use names {name!r}, but no kernel has that name.{did_you_mean(name, [*known, AUTO, ALL])}"
                )
        self._begin()

    def _begin(self) -> None:
        """Reset the state of one run."""
        self._kernels: dict[str, Kernel] = {}
        "Those that may be used, by name."
        self._undecided = False
        "Whether the first batch is still to be measured."
        self._used: list[str] = []
        self._stand_ins = patch.StandIns()

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, build: Build, phase: str) -> None:
        if phase != "surgery":
            return
        self._begin()
        device = trainer.env.device
        acts = self._acts_on(device)
        self._kernels = self._load() if self._named or acts else {}  # names are refused on any device
        if not acts:
            self._kernels = {}
            logger.info("kernels: nothing is swapped: they run on CUDA, and this run is on %s.", device.type)
            return
        compiled = any("compile" in plugin.provides for plugin in trainer.stack)
        build_dynamo_table(soon=compiled)
        if self.config.use == AUTO:
            why_not = _why_not_measured(trainer, compiled)
            self._undecided = not why_not
            if why_not:
                logger.info("kernels.use=auto: %s is not measured and runs as written. Name kernels.", why_not)
            return
        self._swap_in(list(self._kernels))

    def _acts_on(self, device: torch.device) -> bool:
        return device.type == "cuda" or (INTERPRETED and device.type == "cpu" and bool(self._named))

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        if self._undecided:
            self._undecided = False
            self._decide(step)
        with self._stand_ins:
            return (yield)

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self) -> Generator[None, Any, Any]:
        with self._stand_ins:
            return (yield)

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return {"looked": not self._undecided, "used": list(self._used)}

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        if self.config.use != AUTO or not state["looked"] or not self._undecided:
            return
        self._undecided = False
        missing = sorted(set(state["used"]) - set(self._kernels))
        if missing:
            logger.warning(
                "kernels: the resumed run used %s, which replaces nothing now: torch's own functions run instead, and "
                "round differently.",
                ", ".join(missing),
            )
        self._swap_in([name for name in state["used"] if name in self._kernels])

    @forge.hookimpl
    def forge_end(self) -> None:
        self._begin()

    # -- which kernels ------------------------------------------------------------------------------------------------

    def _load(self) -> dict[str, Kernel]:
        """Return the kernels to use or choose from. A broken package fails only if it is named."""
        found: dict[str, Kernel] = {}
        taken: dict[str, str] = {}
        for name in self._named or discovery.names():
            try:
                kernel = discovery.load(name)
                patch.StandIns(kernel.replaces)  # refuses functions that torch does not have
            except ForgeError as error:
                if self._named:
                    raise
                logger.warning("kernels: %s", error)
                continue
            if not kernel.replaces:
                if self._named:
                    logger.warning(
                        "kernels.use names %r, which replaces no function of torch, and does nothing here: call "
                        "forge.kernels.%s in your task.", name, name,
                    )  # fmt: skip
                continue
            rival = next((taken[target] for target in kernel.replaces if target in taken), None)
            if rival is None:
                found[name] = kernel
                taken.update(dict.fromkeys(kernel.replaces, name))
            elif self._named:
                raise RecipeError(f"kernels.use: {rival!r} and {name!r} replace the same function. Name one of them.")
        return found

    def _swap_in(self, names: list[str]) -> None:
        """Use these kernels from now on."""
        self._used, self._stand_ins = names, self._stand_ins_of(names)
        if names:
            logger.info("kernels: %s run where they support a call.", ", ".join(names))

    def _stand_ins_of(self, names: list[str]) -> patch.StandIns:
        return patch.StandIns({target: call for name in names for target, call in self._kernels[name].replaces.items()})

    # -- auto ---------------------------------------------------------------------------------------------------------

    def _decide(self, step: forge.Step) -> None:
        """Time the first batch with all kernels and without, and use them if the step is faster."""
        every = list(self._kernels)
        try:
            with step.trainer.env.no_timeout():
                written, swapped = _measured(step, self._stand_ins_of(every))
        except Exception as error:  # of a kernel, or of the task: then the run's own step fails in the same way
            logger.warning("kernels: the first batch could not be measured, and runs as written: %s", error)
            return
        finally:
            build_dynamo_table()
        faster = swapped <= (1 - LEAST_GAIN) * written
        logger.info(
            "kernels: forward and backward of the first batch take %.4g ms as written, and %.4g ms with %s: %s.",
            written * 1e3, swapped * 1e3, ", ".join(every), "they are used" if faster else "it runs as written",
        )  # fmt: skip
        if faster:
            self._swap_in(every)


def _why_not_measured(trainer: forge.Run, compiled: bool) -> str:
    """Return what cannot be measured by one step of its own, or nothing."""
    if compiled:
        return "a compiled step"
    if trainer.env.world > 1:
        return "a step of several ranks"
    return "" if trainer.verb == "fit" else str(trainer.verb)


def _measured(step: forge.Step, stand_ins: patch.StandIns) -> tuple[float, float]:
    """Return the seconds of forward and backward of a step's first batch, as written and with kernels; no side effects
    on the run. Raise ForgeError if the losses differ."""
    trainer = step.trainer
    own = {id(parameter) for parameter in step.parameters()}
    wanted = [p for p in trainer.task.parameters() if id(p) in own and p.requires_grad]
    with without_side_effects(trainer):
        batch = trainer.hooks.forge_prepare_batch(step, step.window[0])

    def once() -> Tensor:
        with torch.enable_grad():
            output = trainer.hooks.forge_forward(step, batch)
            loss = output if isinstance(output, Tensor) else output["loss"]
            torch.autograd.grad(loss, wanted, allow_unused=True)
        return loss.detach()

    def alone(context: AbstractContextManager[Any]) -> float:
        with without_side_effects(trainer), context:
            return float(once())

    # a kernel would hide torch's losses from the check of the first batch
    written = alone(LossWatch() if trainer.task.check_first_batch else nullcontext())
    swapped = alone(stand_ins)
    if not abs(swapped - written) <= ROUNDING * max(abs(written), ROUNDING):
        raise ForgeError(f"the loss is {swapped:.6g} with kernels, and {written:.6g} without")
    seconds: list[list[float]] = [[], []]
    with without_side_effects(trainer):
        for _ in range(2):  # in turns, so that a drift of the device affects both
            for taken, context in zip(seconds, (nullcontext(), stand_ins), strict=True):
                with context:
                    taken.append(_seconds(once, trainer.env.device))
    return min(seconds[0]), min(seconds[1])


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return the median of what a function takes; on CUDA by Triton's do_bench, on the device's clock."""
    if device.type == "cuda":
        from triton.testing import do_bench

        with torch.cuda.device(device):
            milliseconds: Any = do_bench(work, return_mode="median")
        return milliseconds / 1e3
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.1).median
