"""Every hook of forge: what it is for, when it fires, and who may own or wrap it. This file is THE contract.

**Actions** (``firstresult=True``) do something that must be done exactly once. Their default is the Trainer's own, in
:mod:`forge.engine.default_actions`. A plugin may *wrap* an action (``@forge.hookimpl(wrapper=True)``, a generator that
yields once: code around it, or a changed result) or *own* it: do the work and **return something that is not None**
(``True`` where nothing else is asked for). An owner that returns None hands the action on to the default. Two owners
of one action stop the run before it starts. A wrapper cannot change arguments; to change an input, wrap the action
that makes it.

**Events** call everybody, in stack order, outermost first.

The rhythm, with every hook in its place::

    forge_configure -> forge_setup_env -> forge_build_model (5 phases) -> forge_build_loader (each stage)
        -> forge_build_optimizers -> forge_start
    until done or a stop was agreed:
        forge_plan_step                     how many micro-batches make the next window
        forge_train_step                    once per optimizer
            for each micro-batch:
                forge_prepare_batch
                forge_micro_step
                    forge_forward
                    forge_backward
            forge_finalize_grads            make .grad the true gradient
            forge_inspect_grads             read it
            forge_edit_grads                change it
            forge_optimizer_step            unless the update is skipped
        forge_step_end
        forge_log                           when a log is due
        forge_evaluate                      when validation is due: forge_prepare_batch, forge_forward per batch
        forge_log                           the validation's metrics
        forge_boundary
        forge_save                          when a checkpoint is due
    forge_export                            the trained weights, once a fit has reached its end
    on error: forge_exception               always: forge_end

`trainer.hooks.<hook>` calls a hook with all its wrappers (None for an event without an implementation);
`trainer.core.<hook>` is the bare default of an action. Methods take any subset of the arguments, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from forge.contract.run import Run
    from forge.contract.step import Step
    from forge.contract.task import Build
    from forge.env import Env
    from forge.optim.optimizers import Optimizers

PROJECT = "forge"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a method as a hook implementation; `@hookimpl(wrapper=True)` marks a wrapper (a generator)."""


# ---------------------------------------------------------------------------------------------------------------------
# Build: once, for every verb (`trainer.verb` is "fit", "validate", "test" or "predict").


@hookspec
def forge_configure(trainer: Run, config: dict[str, Any] | None) -> None:
    """Event. Validate options against the Trainer; the last moment at which the stack may change.

    Add with `trainer.stack.add(plugin)`, remove with `trainer.stack.remove(name)`. `config` is the resolved recipe as
    plain data, or None. Nothing has been built yet: neither the device nor the model nor the loaders are known.
    """


@hookspec(firstresult=True)
def forge_setup_env(trainer: Run) -> Env:
    """Action. Return the Env: device, rank, world size, reductions. Own: a distributed strategy."""
    ...


@hookspec
def forge_build_model(trainer: Run, build: Build, phase: str) -> None:
    """Event, fired once per phase in this order; change `build.task` in place or replace `build.model`.

    ``surgery``: change layers, freeze parameters (the task is still where the user made it);
    ``shard``: tensor parallelism; ``remat``: activation checkpointing; ``compile``: torch.compile, in place;
    ``parallel``: wrap `build.model` (DDP) or shard it (FSDP2). The task moves to its device after ``surgery``.
    """


@hookspec(firstresult=True)
def forge_build_loader(trainer: Run, stage: str) -> Any:
    """Action. Return what to iterate for a stage ("train", "val", "test", "predict"), a dict of loaders, or None.

    The default returns what the user passed, with the Trainer's seed handed on; on several ranks it gives this rank's
    portion of each batch (`forge.data.sharding.Portion`). Wrap: device prefetch.
    """


@hookspec(firstresult=True)
def forge_build_optimizers(trainer: Run) -> Optimizers:
    """Action, only in fit. Return the Optimizers; `trainer.planned_updates` is known by now. Wrap: add a schedule."""
    ...


@hookspec
def forge_start(trainer: Run) -> None:
    """Event. Everything is built: open sinks, allocate state. Then a resumed run is restored, RNG last, and the loop
    begins.

    A plugin object can serve several runs, so state that belongs to one run is made here, not in `__init__`.
    """


# ---------------------------------------------------------------------------------------------------------------------
# One step, training only. A step is one optimizer update over a window of micro-batches.


@hookspec(firstresult=True)
def forge_plan_step(trainer: Run) -> int:
    """Action. How many micro-batches the next window takes (the epoch's last window may be shorter). Own: accumulation.

    It is also asked once before training, to count `trainer.planned_updates`.
    """
    ...


@hookspec(firstresult=True)
def forge_train_step(step: Step) -> bool:
    """Action. One optimizer's whole update: `step.run_window()`, then `step.finish()`. With several optimizers it fires
    once per name.

    Wrap: a profiler's range. Own: a second pass, whole-step capture, pipelines; call the two halves as often as needed
    and return True. An owner that runs the window more than once provides `second_pass`.
    """
    ...


@hookspec(firstresult=True)
def forge_micro_step(step: Step, batch: Any) -> bool:
    """Action. Forward, record metrics, backward, for one prepared micro-batch; `step.micro` and `step.is_last_micro`
    say which. Wrap: no_sync, detect_anomaly. An owner returns True."""
    ...


@hookspec(firstresult=True)
def forge_backward(step: Step, loss: Tensor) -> bool:
    """Action. Backpropagate `loss`, which is weighted for its window already. Own: a loss scaler; return True."""
    ...


@hookspec
def forge_finalize_grads(step: Step) -> None:
    """Event. Make `.grad` the true gradient: unscale, reduce by hand. No gradient is read before this."""


@hookspec
def forge_inspect_grads(step: Step) -> None:
    """Event. Read gradients, never change them; `step.skip_update(reason)` keeps them from the weights."""


@hookspec
def forge_edit_grads(step: Step) -> None:
    """Event. Change gradients: limit their norm, add noise. Use `step.parameters()`: those of the current optimizer.
    Not called for a skipped update."""


@hookspec(firstresult=True)
def forge_optimizer_step(step: Step) -> bool:
    """Action. Step `step.optimizer`; return whether the weights changed. Not called for a skipped update.
    Own: a scaler's step."""
    ...


@hookspec
def forge_step_end(step: Step) -> None:
    """Event, after every window, skipped or not: `step.updated` says. `progress.update` has grown. EMA, scaler.update.

    With several optimizers it fires once: `step.name` is None, `step.updated_names` says who stepped.
    """


# ---------------------------------------------------------------------------------------------------------------------
# Every stage: `step.stage` is "train", "val", "test" or "predict".
# forge_forward alone has one more, "collect": its batch is a function of the task, which makes data (forge.data.live).


@hookspec(firstresult=True)
def forge_prepare_batch(step: Step, batch: Any) -> Any:
    """Action. Return the batch as the task shall see it; the default moves it to the device. Wrap: mixup, another
    memory format (look at `step.stage`)."""


@hookspec(firstresult=True)
def forge_forward(step: Step, batch: Any) -> Any:
    """Action. Call `trainer.model` for the stage and return the task's output. Wrap: autocast."""


# ---------------------------------------------------------------------------------------------------------------------
# Around the steps.


@hookspec(firstresult=True)
def forge_evaluate(trainer: Run, stage: str) -> Any:
    """Action. Run one whole evaluation; return its metrics, or the list of outputs for "predict".

    Wrap: EMA (swap in and out), early stopping, best-so-far: a wrapper sees the result before the boundary.
    """


@hookspec
def forge_log(trainer: Run, update: int, metrics: dict[str, Any]) -> None:
    """Event. Metrics have arrived on the host: numbers, `forge.Image`, `forge.Text`,
    `forge.Histogram`, `forge.Embedding`. `update` is the x-axis.

    On an accelerator training metrics arrive one update after their interval ended, so that nothing waits.
    """


@hookspec
def forge_boundary(trainer: Run, step: Step) -> None:
    """Event, at the end of every update: observe and request, never change state here. `step.ends_epoch` is known."""


@hookspec
def forge_save(trainer: Run, capture: dict[str, Any]) -> None:
    """Event. A checkpoint was due: `capture` is the run's whole state, taken once after the last boundary.

    It also fires at a granted stop and at the end of a fit, on all ranks at the same update. Tensors in `capture` are
    the live ones: a plugin that keeps them copies them before this returns.
    """


@hookspec(firstresult=True)
def forge_export(trainer: Run, path: Path) -> bool:
    """Action, once a fit has reached its end. Write the weights that the run was for to `path`, a safetensors file.

    Called on all ranks; rank 0 writes. Wrap: put averaged weights in the task's place meanwhile. An owner returns True.
    """
    ...


@hookspec
def forge_state_dict(trainer: Run) -> dict[str, Any]:
    """Event. Return this plugin's state as plain data and tensors; it is filed under the plugin's name.

    Called for every checkpoint, at the start and after the first update (where what cannot be saved is refused): change
    nothing here. A plugin that finds that this state must not be saved calls `trainer.request_rewind`, or raises.
    """
    ...


@hookspec
def forge_load_state_dict(trainer: Run, state: dict[str, Any]) -> None:
    """Event. Take back what this plugin's `forge_state_dict` returned; each plugin gets its own."""


@hookspec
def forge_exception(trainer: Run, error: BaseException) -> None:
    """Event. The run is failing with `error`, which will be re-raised. Observe; an error raised here is only noted."""


@hookspec
def forge_end(trainer: Run) -> None:
    """Event. The run is over, well or badly: close what forge_start opened. Called in reverse order, and always, once
    forge_configure has returned; no wrappers."""
