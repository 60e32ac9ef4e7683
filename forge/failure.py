"""Failure: say where an error came from, in forge's own terms."""

from __future__ import annotations

import socket
from types import FrameType
from typing import TYPE_CHECKING, Any

from forge import nondeterministic
from forge.errors import DeterminismError, ForgeError, TaskError
from forge.stack import CORE, TASK
from forge.task import STAGE_METHODS, TaskModule

if TYPE_CHECKING:
    from forge.trainer import Trainer

NAMED_METHODS = {*STAGE_METHODS.values(), "configure_optimizers", "num_items", "evaluation_end", "takes_turn"}
HINTS = {
    "inference tensor": (
        "A tensor made during evaluation was used for training. Set `evaluation = 'no_grad'` on your TaskModule."
    ),
    "expected more than 1 value per channel": (
        "BatchNorm needs two samples or more, and this batch, or this rank's share of it, has one: often the last one "
        "of an epoch. Use drop_last=True, or another batch size."
    ),
    "expected to have finished reduction in the prior iteration": (
        "Some parameters took no part in the last step, so their gradients never came. Set ddp.find_unused=true, or "
        "freeze them."
    ),
    "device-side assert": (
        "A kernel failed on the GPU, often a label or index out of range. Run with device='cpu' to see which."
    ),
}


def explain(trainer: Trainer, error: BaseException) -> BaseException:
    """Add a note that names plugin, hook and update; turn what says too little, a StopIteration out of user code or an
    operation that is not deterministic, into an error of its own."""
    if getattr(error, "__forge_explained__", False):
        return error
    # one that leaves a generator is a RuntimeError by then
    out_of_generator = isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration)
    stopped = error.__cause__ if out_of_generator and error.__cause__ is not None else error
    where = _where(trainer, stopped)
    if isinstance(stopped, StopIteration):
        # left alone it would end somebody's for loop in silence
        error = TaskError(f"{where or 'The run'} raised StopIteration, which is an error here and no end of an epoch.")
    elif not isinstance(error, ForgeError):
        told = nondeterministic.explanation(trainer, error)
        error = DeterminismError(told) if told else error
        if where:
            error.add_note(f"forge: raised in {where}.")
    for symptom, hint in HINTS.items():
        if symptom in str(error).lower():
            error.add_note(f"forge: {hint}")
    error.__forge_where__ = where.replace(_rank(trainer), "")  # pyright: ignore[reportAttributeAccessIssue]
    error.__forge_explained__ = True  # pyright: ignore[reportAttributeAccessIssue]
    return error


def first_cause(trainer: Trainer, error: BaseException) -> BaseException:
    """Of several ranks the first to fail prints its error, here and now; all others leave with a `PeerFailed`."""
    watch = getattr(getattr(trainer, "env", None), "watch", None)
    return error if watch is None else watch.judge(error)


def stop_watching(trainer: Trainer) -> None:
    """A run that has failed is over on this rank; one that went well has stopped its watch already."""
    env: Any = getattr(trainer, "env", None)
    if getattr(env, "watch", None) is not None:
        env.watch.stop()
        env.watch = None


def _where(trainer: Trainer, error: BaseException) -> str:
    culprit = trainer.stack.blame(error)
    moment = f"at update {trainer.progress.update}{_rank(trainer)}"
    if culprit is not None and culprit[0] not in (CORE, TASK):
        return f"plugin {culprit[0]!r}, hook {culprit[1]}, {moment}"
    method = _task_method(error)
    if method:
        return f"{type(trainer.task).__name__}.{method}, {moment}{_micro(trainer, method)}"
    if culprit is not None and culprit[0] == TASK:
        return f"the task's {culprit[1]}, {moment}"
    return ""


def _rank(trainer: Trainer) -> str:
    """Which of several processes, and where it ran."""
    env = getattr(trainer, "env", None)
    return "" if env is None or env.world == 1 else f", rank {env.rank} of {env.world} on {socket.gethostname()}"


def _micro(trainer: Trainer, method: str) -> str:
    step = trainer.step
    if method != "training_step" or step is None:
        return ""
    return f", epoch {step.epoch}, micro-batch {step.micro + 1} of {len(step.window)}"


def _task_method(error: BaseException) -> str:
    """The step of the task that was running."""
    trace = error.__traceback__
    while trace is not None:
        frame: FrameType = trace.tb_frame
        if isinstance(frame.f_locals.get("self"), TaskModule) and frame.f_code.co_name in NAMED_METHODS:
            return frame.f_code.co_name
        trace = trace.tb_next
    return ""
