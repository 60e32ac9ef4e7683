"""Explain errors: name the plugin, hook, task method and update in which an error was raised."""

from __future__ import annotations

import logging
import socket
import traceback
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType
from typing import Any

from forge.contract.run import Run
from forge.contract.stack import CORE, TASK
from forge.contract.step import Step
from forge.contract.task import STAGE_METHODS, TaskModule, add_hint
from forge.diagnose import nondeterminism
from forge.diagnose.again import is_in_backward
from forge.diagnose.cures import cures
from forge.errors import DeterminismError, ForgeError, TaskError
from forge.util.tracebacks import as_text, shorten, shows_all

logger = logging.getLogger("forge")

NAMED_METHODS = {*STAGE_METHODS.values(), "configure_optimizers", "num_items", "evaluation_end", "takes_turn"}
EVALUATIONS = {"val": "validation", "test": "the test", "predict": "prediction"}
HINTS = {
    "inference tensor": (
        "A tensor made during evaluation was used for training. Set `evaluation = 'no_grad'` on your TaskModule."
    ),
    "expected more than 1 value per channel": (
        "BatchNorm needs two samples or more, and this batch, or this rank's share of it, has one: often the last "
        "batch of an epoch. Use drop_last=True, or another batch size."
    ),
    "device-side assert": (
        "A kernel failed on the GPU, often a label or index out of range. Run with device='cpu' to see which."
    ),
}


def explain(trainer: Run, error: BaseException) -> BaseException:
    """Add notes that name plugin, hook and update, the tensors that met, and a cure; shorten the traceback.

    A StopIteration out of user code, and torch's error about a nondeterministic operation, are replaced by an error
    that explains it.
    """
    if getattr(error, "__forge_explained__", False):
        shorten(error)
        return error
    # Python turns one that leaves a generator into a RuntimeError
    out_of_generator = isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration)
    stopped = error.__cause__ if out_of_generator and error.__cause__ is not None else error
    where = _where(trainer, stopped)
    if isinstance(stopped, StopIteration):
        # unhandled it would silently end a for loop
        error = TaskError(f"{where or 'The run'} raised StopIteration, which is an error here and no end of an epoch.")
    elif not isinstance(error, ForgeError):
        message = nondeterminism.explanation(trainer, error)
        error = DeterminismError(message) if message else error
        if where:
            error.add_note(f"forge: raised in {where}.")
        if not message:
            _add_cures(trainer, error)
    for symptom, hint in [*HINTS.items(), *_hints(trainer)]:
        if symptom in str(error).lower():
            error.add_note(f"forge: {hint}")
    add_hint(error)
    error.__forge_where__ = where.replace(_rank(trainer), "")  # pyright: ignore[reportAttributeAccessIssue]
    error.__forge_explained__ = True  # pyright: ignore[reportAttributeAccessIssue]
    _leave_out_frames(trainer, error)
    return error


def _hints(trainer: Run) -> Iterator[tuple[str, str]]:
    """Yield the words of errors that plugins of the stack cause, each with what to do."""
    for plugin in trainer.stack:
        for words, cure in plugin.cures.items():
            if " " in words:  # one word is the name of a problem
                yield words, cure.format(name=plugin.name)


def _add_cures(trainer: Run, error: BaseException) -> None:
    """Add what met where, and what to do; a failure to find that out must not hide the error."""
    try:
        for text in cures(trainer, error):
            error.add_note(f"forge: {text}")
    except Exception as problem:
        logger.debug("forge found no cure: %s: %s", type(problem).__name__, problem)


def _leave_out_frames(trainer: Run, error: BaseException) -> None:
    """Shorten the traceback. The run folder keeps all of it, for an error that may never come again."""
    if not isinstance(error, Exception) or shows_all():
        return
    if trainer.run_dir is not None and trainer.verb == "fit" and not isinstance(error, ForgeError):
        rank = "" if trainer.env.is_main else f"-rank{trainer.env.rank}"
        with suppress(OSError):
            (trainer.run_dir / f"traceback{rank}.txt").write_text(as_text(error), errors="backslashreplace")
    shorten(error)


def first_cause(trainer: Run, error: BaseException) -> BaseException:
    """Return the error to raise: the first rank to fail prints its own error, all others get a `PeerFailed`."""
    heartbeat = getattr(getattr(trainer, "env", None), "heartbeat", None)
    return error if heartbeat is None else heartbeat.judge(error)


def stop_watching(trainer: Run) -> None:
    """Stop the heartbeat of a failed run; a successful run has stopped it already."""
    env: Any = getattr(trainer, "env", None)
    if getattr(env, "heartbeat", None) is not None:
        env.heartbeat.stop()
        env.heartbeat = None


def _where(trainer: Run, error: BaseException) -> str:
    culprit = trainer.stack.blame(error)
    moment = f"at update {trainer.progress.update}{_rank(trainer)}"
    if culprit is not None and culprit[0] not in (CORE, TASK):
        return f"plugin {culprit[0]!r}, hook {culprit[1]}, {moment}"
    found = _task_method(trainer.task, error)
    if found:
        return _in_task(trainer, error, *found)
    if culprit is not None and culprit[0] == TASK:
        return f"the task's {culprit[1]}, {moment}"
    if is_in_backward(error) and trainer.step is not None:
        return f"the backward pass of {_in_task(trainer, error, 'training_step')}"
    return ""


def _rank(trainer: Run) -> str:
    """Name this rank and its host; "" for a single process."""
    env = getattr(trainer, "env", None)
    return "" if env is None or env.world == 1 else f", rank {env.rank} of {env.world} on {socket.gethostname()}"


def _in_task(trainer: Run, error: BaseException, method: str, code: CodeType | None = None) -> str:
    """Name the task's method by the stage that ran it, and when."""
    task, update = type(trainer.task).__name__, trainer.progress.update
    step: Step | None = getattr(error, "__forge_eval_step__", None)
    if step is not None:
        after = f" after update {update}" if trainer.verb == "fit" else ""
        batch = f"batch {step.micro + 1}{'' if step.loader is None else f' of {step.loader!r}'}"
        called = _called(trainer.task, STAGE_METHODS[step.stage], method, code)
        return f"{task}.{called}, in {EVALUATIONS[step.stage]}{after}{_rank(trainer)}, {batch}"
    now = trainer.step if method == "training_step" else None
    micro = "" if now is None else f", epoch {now.epoch}, micro-batch {now.micro + 1} of {len(now.window)}"
    return f"{task}.{method}, at update {update}{_rank(trainer)}{micro}"


def _called(task: Any, wanted: str, method: str, code: CodeType | None) -> str:
    """Return the stage's method if its code ran: in `validation_step = training_step` the code has another name."""
    if method == wanted or code is None or _code(task, wanted) is not code:
        return method
    return wanted if code.co_name not in NAMED_METHODS else f"{wanted} (which is {code.co_name})"


def _task_method(task: Any, error: BaseException) -> tuple[str, CodeType] | None:
    """Return the name and code of the task's method that was running; the code may be a lambda."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, TaskModule):
            names = [code.co_name] if code.co_name in NAMED_METHODS else []
            names += [name for name in sorted(NAMED_METHODS) if _code(task, name) is code]
            if names:
                return names[0], code
    return None


def _code(task: Any, method: str) -> CodeType | None:
    return getattr(getattr(type(task), method, None), "__code__", None)
