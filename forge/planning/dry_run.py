"""Dry run: the Trainer runs a few steps of a real stack on fake tensors, and every byte is counted."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext, suppress
from typing import Any, Protocol

from torch import Tensor, nn

from forge.config.build import make_plugins
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.step import Step
from forge.contract.task import TaskModule
from forge.data.accumulation_windows import batch_size
from forge.engine.trainer import Trainer
from forge.env import Env, move
from forge.metrics.means import Means
from forge.optim.optimizers import Optimizers
from forge.planning.blocks import block_bytes
from forge.planning.cuda_ops import chosen_as_on_cuda
from forge.planning.fake_cuda import CUDA, FakeCudaMode
from forge.planning.footprint import Footprint
from forge.planning.refusal import READS, explained
from forge.planning.tracker import ROUNDING, Tracker
from forge.snapshot.left_out import SCHEDULE, is_left_out
from forge.torch_internals import fake_tensors, pytree
from forge.tuning.trial import quiet
from forge.util.frozen import every_module, frozen_in

UPDATES = 2
"""The first update makes the optimizer's state; the second is like all later ones."""
PLANNED_APART = ("compiled_code", SCHEDULE, "strategy", "split_layers")
"""What plugins that are planned separately provide: strategies by formula, compiled code as if it were eager.

Schedules are left out: rates take no memory.
"""

MakeTask = Callable[[], TaskModule]


class StepCounter(Protocol):
    """What counts the operations of a measured step, while it is entered."""

    phase: str
    '"forward", "backward" or "optimizer": where the step is.'

    def __enter__(self) -> Any: ...
    def __exit__(self, *error: Any) -> Any: ...

    def watch(self, task: nn.Module, tracker: Tracker) -> None:
        """Look at a task before its step runs."""

    def forget(self) -> None:
        """Drop what was counted so far."""


def run_dry(
    make_task: MakeTask,
    batch: Any,
    plugins: Mapping[str, Mapping[str, Any]] | None = None,
    counter: StepCounter | None = None,
) -> Footprint:
    """Return the memory of a training step on `batch` on a CUDA device, with this stack; nothing is computed.

    `counter` counts the operations of the last update.
    """
    with explained(), quiet(), chosen_as_on_cuda():
        made = make_plugins(plugins or {})
        ahead = sum(getattr(plugin.config, "depth", 0) for plugin in made if "reads_ahead" in plugin.effects)
        kept = [plugin for plugin in made if not _is_planned_apart(plugin)]
        mode = FakeCudaMode({type(plugin).__module__.partition(".")[0] for plugin in kept}, type(counter).__module__)
        task = _without_values(make_task, mode)
        dry = DryRun(_fake(batch, mode), ahead, counter)
        items = int(task.num_items(batch))  # of the real batch: counting may read its values
        task.num_items = lambda batch: items
        vars(task)["check_first_batch"] = False  # it reads values
        options: dict[str, Any] = {"run_dir": False, "device": "cpu", "validate_every": None}
        trainer = Trainer(plugins=[dry, *kept], max_updates=UPDATES + 1, **options)
        with mode, dry.tracker, counter or nullcontext(), suppress(DryRunDone):
            trainer.fit(task, dry.batches())
        return dry.footprint()


class DryRunDone(Exception):
    """Ends the dry run: a regular end of the run would read its metrics."""


class FakeCudaEnv(Env):
    """Stands for one CUDA device: a moved batch is a copy, and the task is in place already."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def place(self, task: nn.Module) -> None:
        pass

    def move(self, batch: Any) -> Any:
        return move(batch, CUDA)


class DryRun(Plugin):
    """Counts while a stack trains on fake tensors."""

    def __init__(self, batch: Any, ahead: int, counter: StepCounter | None = None):
        super().__init__()
        self.batch, self.ahead, self.counter = batch, ahead, counter
        self.tracker = Tracker()
        self.activations = self.gradients = 0
        self.held: list[Any] = []
        self.task: TaskModule
        self.optimizers: Optimizers

    def batches(self) -> list[Any]:
        """Return enough batches for any window; only shapes matter, so all are the same."""
        return [self.batch] * 10_000

    @hookimpl
    def forge_setup_env(self, trainer: Trainer) -> Env:
        return FakeCudaEnv()

    @hookimpl(wrapper=True)
    def forge_build_optimizers(self, trainer: Trainer) -> Generator[None, Optimizers, Optimizers]:
        self.task = trainer.task
        self.tracker.watch(trainer.task)
        if self.counter is not None:
            self.counter.watch(trainer.task, self.tracker)
        optimizers = yield
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                # torch's default on CUDA, which makes copies as large as the parameters
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = not group.get("differentiable")
        self.optimizers = optimizers
        return optimizers

    @hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        trainer.means = Means(CUDA)  # it leaves metrics unread; on the host they would be read
        self.held = [trainer.env.move(self.batch) for _ in range(self.ahead)]

    @hookimpl(wrapper=True)
    def forge_train_step(self, step: Step) -> Generator[None, Any, Any]:
        if not step.trainer.keep_rng:  # generators are kept by device, and CUDA's may not exist
            step.trainer.env.device = CUDA  # only now: autocast must be set up for the host, where the tensors are
        return (yield)

    @hookimpl(wrapper=True)
    def forge_forward(self) -> Generator[None, Any, Any]:
        before = self.tracker.live
        self._count_as("forward")
        output = yield
        self._count_as("backward")
        self.activations = max(self.activations, self.tracker.live - before)
        return output

    def _count_as(self, phase: str) -> None:
        if self.counter is not None:
            self.counter.phase = phase

    @hookimpl
    def forge_inspect_grads(self, step: Step) -> None:
        self._count_as("optimizer")
        found = [p.grad for p in self.task.parameters() if p.grad is not None]
        self.gradients = max(self.gradients, _rounded(found))

    @hookimpl
    def forge_step_end(self, step: Step) -> None:
        if step.index + 1 == UPDATES:
            raise DryRunDone
        self.tracker.forget_moments()
        if self.counter is not None:
            self.counter.forget()

    def footprint(self) -> Footprint:
        states = [dict(optimizer.state) for optimizer in self.optimizers.values()]
        block, outside = block_bytes(self.task)
        held = [each.module for each in frozen_in(self.task).values()]
        frozen = [tensor for part in held for tensor in (*part.parameters(), *part.buffers())]
        return Footprint(
            samples=batch_size(self.batch) or 1,
            parameters=_rounded([*self.task.parameters(), *self.task.buffers(), *frozen]),
            buffers=_rounded([*self.task.buffers(), *frozen]),
            gradients=self.gradients,
            optimizer=_rounded([leaf for leaf in pytree.tree_leaves(states) if isinstance(leaf, Tensor)]),
            activations=self.activations,
            moments=dict(self.tracker.moments),
            block=block,
            outside=outside,
        )


def _is_planned_apart(plugin: Plugin) -> bool:
    return is_left_out(plugin, *PLANNED_APART) or plugin.observer


def _without_values(make_task: MakeTask, mode: fake_tensors.FakeTensorMode) -> TaskModule:
    """Build the task on fake tensors; if its `__init__` reads values, build it for real and convert it."""
    try:
        with mode:
            return make_task()
    except READS:
        task = make_task()
    for module in every_module(task):
        for tensors in (module._parameters, module._buffers):
            fakes: dict[str, Any] = {name: mode.from_tensor(t) for name, t in tensors.items() if t is not None}
            tensors.update(fakes)
    return task


def _fake(batch: Any, mode: fake_tensors.FakeTensorMode) -> Any:
    """Return the batch without values, outside the device's memory."""
    with mode:
        return move(batch, CUDA)


def _rounded(tensors: list[Tensor]) -> int:
    """Return the bytes as CUDA's allocator counts them, each storage once."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(-(-size // ROUNDING) * ROUNDING for size in sizes.values())
