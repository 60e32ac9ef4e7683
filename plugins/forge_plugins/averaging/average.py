"""A running average of a task's weights, shared by `ema` and `swa`."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import forge
from forge.checkpoint.weights import noted_as_average
from forge.contract.run_lengths import check_length, updates_of
from forge.errors import ForgeError, StackError, TaskError
from forge.optim.sharded import is_distributed, local, whole
from forge.snapshot.copies import without_hooks
from forge.torch_internals import foreach_copy_
from forge_plugins.averaging.target import ShardedTarget, Target
from forge_plugins.torch_internals import foreach_lerp_

logger = logging.getLogger("forge")


class Average:
    """A running average of a task's parameters, and optionally its buffers, under the task's own names.

    It starts as a copy of the first weights; later weights move it. Frozen parameters cost nothing, since their average
    is their value. `include_thawed`, called before every update, adds them once they are trained.

    Half precision is averaged in float32, because the small steps of an average would be lost in rounding. Each rank
    averages its own part of sharded parameters.
    """

    def __init__(self, task: nn.Module, buffers: bool = False):
        self.task, self.with_buffers = task, buffers
        self.count = 0
        "Number of weights averaged so far; 0: no average yet."
        self.tensors: dict[str, Tensor] = {}
        "The averages by name: parameters first, then buffers."
        self._parameters: list[nn.Parameter] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []
        "(averages, parameters) by device and dtype: one kernel moves each."
        self.scattered = False
        "Whether ranks hold different parameters, and have the others without memory."
        self._sharded = False
        "Whether parameters are sharded."
        self._buffers: list[tuple[dict[str, Tensor | None], str]] = []
        "Owners of the averaged buffers: a module may replace the tensor of a buffer."
        self.frozen: list[tuple[str, nn.Parameter]] = []
        "The frozen parameters, once an average exists."
        self.targets: dict[str, Target] = {}
        "Parts of the task with averaged weights, by name, once a step has asked for them."
        self.sharded: dict[str, nn.Parameter] = {}
        "The shards by name, where FSDP divides the task: inside a step it has whole parameters in their place."
        self.device, self.dtype = torch.device("cpu"), cast("torch.dtype | None", None)
        "Where, and in what, FSDP computes with them."

    def take(self, weight: float) -> None:
        """Move the average towards the current weights by this share of the way."""
        if not self.count:
            self.count = 1
            parameters = {name: _copied(p) for name, p in self._named().items() if p.requires_grad}
            self.tensors = {**parameters, **{name: _copied(buffer) for name, buffer in self._named_buffers()}}
            self._find_live()
            return
        if self.frozen:
            self.include_thawed()
        with torch.no_grad():
            for averages, live in self._groups:
                if self._sharded:
                    live = [local(parameter) for parameter in live]
                if averages[0].dtype is not live[0].dtype:
                    live = [parameter.to(averages[0].dtype) for parameter in live]
                foreach_lerp_(averages, live, weight)
            if self._buffers:
                averages = list(self.tensors.values())[len(self._parameters) :]
                live = [now.to(average.dtype) for average, now in zip(averages, self._live_buffers(), strict=True)]
                foreach_lerp_(averages, live, weight)
        self.count += 1

    def include_thawed(self) -> None:
        """Add parameters that are trained from this update on, with their value so far."""
        thawed = {name: _copied(parameter) for name, parameter in self.frozen if parameter.requires_grad}
        if thawed:
            self.tensors = {**thawed, **self.tensors}
            self._find_live()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Hold the average in the task, in the memory of its weights, inside the `with`; then restore the weights bit
        for bit, even after an error."""
        if not self.count:
            yield
            return
        buffers = self._live_buffers()
        held = [tensor.detach().clone() for tensor in self._live()]
        try:
            self._put([local(tensor) for tensor in self.tensors.values()])
            yield
        finally:
            for (owner, name), buffer in zip(self._buffers, buffers, strict=True):
                owner[name] = buffer  # a forward may have replaced it
            self._put(held)

    def copy_to(self, task: nn.Module) -> None:
        """Copy the averaged weights to this task, or to another task, which also gets everything else that is saved."""
        there, given = _tensors(task), self.tensors
        if task is not self.task:
            saved = {name for name, _ in self.task.named_parameters()} | self.task.state_dict().keys()
            given = {name: tensor for name, tensor in _tensors(self.task).items() if name in saved} | given
        odd = [name for name, tensor in given.items() if getattr(there.get(name), "shape", None) != tensor.shape]
        if odd:
            raise TaskError(f"{type(task).__name__} has no {odd[0]} of the fitted shape: it is a different task.")
        holders = self._holders(given) if self.scattered else {}
        for name, tensor in given.items():
            values = tensor if is_distributed(there[name]) or tensor.is_meta else whole(tensor)
            if name in holders:
                values = torch.empty_like(tensor, device=there[name].device) if tensor.is_meta else values.contiguous()
                dist.broadcast(values, holders[name])
            with torch.inference_mode():  # as in _put
                there[name].copy_(values)

    def _holders(self, given: Mapping[str, Tensor]) -> dict[str, int]:
        """Return for each tensor that a rank has without memory one that has its values. All ranks must call this."""
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, {name: tensor.is_meta for name, tensor in given.items()})
        return {name: [rank[name] for rank in by_rank].index(False) for name in given if any(r[name] for r in by_rank)}

    # -- inside a step ------------------------------------------------------------------------------------------------

    def target(self, name: str) -> nn.Module:
        """Return a part of the task with its averaged weights, in the modes that the part is in."""
        if name not in self.targets:
            self.targets[name] = ShardedTarget(self, name) if self.sharded else Target(self, name)
            self.targets[name].refresh()  # it alone: others may be in a graph by now
        return self.targets[name].in_modes()

    def refresh(self) -> None:
        """Bring targets up to date, once an update has changed weights and buffers."""
        for target in self.targets.values():
            target.refresh()

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the average under the key that `forge ckpt export --weights` looks for."""
        targets = {"targets": list(self.targets)} if self.targets else {}
        return {"weights": dict(self.tensors), "updates": self.count, **targets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; existing tensors keep their memory."""
        self.count, saved = state["updates"], state["weights"]
        here = {name: p for name, p in self.task.named_parameters() if name in saved}
        here |= dict(self._named_buffers()) if self.count else {}
        self.tensors = {name: self.tensors.get(name, _copied(live)) for name, live in here.items()}
        for name, tensor in self.tensors.items():
            local(tensor).copy_(local(saved.get(name, here[name].detach())))
        self._find_live()
        for name in state.get("targets", ()):  # before the first step: it may change buffers before it asks
            self.target(name)
        self.refresh()

    # -- the averaged tensors -----------------------------------------------------------------------------------------

    def _find_live(self) -> None:
        """Find the tensor of each average; all other parameters are frozen."""
        named = self._named()
        self._parameters = [named[name] for name in self.tensors if name in named]
        self._buffers = [_owner(self.task, name) for name in self.tensors if name not in named]
        self.frozen = [(name, p) for name, p in named.items() if name not in self.tensors] if self.count else []
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for average, parameter in zip(self.tensors.values(), self._parameters, strict=False):
            averages, parameters = groups.setdefault((parameter.device, parameter.dtype), ([], []))
            averages.append(local(average))
            parameters.append(parameter)
        self._sharded = any(map(is_distributed, self._parameters))
        self._groups = list(groups.values())
        for target in self.targets.values():
            target.bind()

    def _named(self) -> dict[str, nn.Parameter]:
        return self.sharded or dict(self.task.named_parameters())

    def _named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the averaged buffers: floats that are saved with the task."""
        saved = self.task.state_dict().keys() if self.with_buffers else ()
        return (
            (n, b) for n, b in self.task.named_buffers() if n in saved and (b.is_floating_point() or b.is_complex())
        )

    def _live_buffers(self) -> list[Any]:
        return [owner[name] for owner, name in self._buffers]

    def _live(self) -> list[Tensor]:
        parameters = map(local, self._parameters) if self._sharded else self._parameters
        return [*parameters, *self._live_buffers()]

    @torch.inference_mode()  # required to write a buffer that a forward replaced in an evaluation
    def _put(self, values: list[Tensor]) -> None:
        foreach_copy_(self._live(), values)


class Averaging(forge.Plugin):
    """Keeps an Average over a fit, saves it, and uses it in place of the weights for evaluation and export.

    A subclass has the options `start` and `evaluate`, and calls `take` in its `forge_step_end`.
    """

    capturable = True
    begins_when_asked = False
    "Whether the average begins with the weights that a step finds when it first asks, unless `start` says when."

    def __init__(self, *first: Any, **values: Any):
        super().__init__(*first, **values)
        check_length(self.config.start, f"{self.name}.start")
        if self.config.evaluate:
            self.provides = ("averaged_weights",)
        else:
            self.forge_evaluate = self.forge_export = None  # pyright: ignore[reportAttributeAccessIssue]
        self._average = Average(nn.Module())  # empty until a fit begins
        self._start, self._announced = 0, False
        self._names: dict[int, str] = {}
        "Names of the parts that a step has asked for, by id."
        self._begins_when_asked = False

    def apply_to(self, task: nn.Module) -> None:
        """Copy the averaged weights of the last fit to a task; the fit itself leaves it the trained ones.

        A task other than the fitted one also gets the parts that are not averaged: frozen parameters, and buffers. On
        several ranks all of them must call this.
        """
        if not self._average.count:
            raise ForgeError(f"{self.name} has averaged nothing yet: fit with it first, beyond {self.name}.start.")
        self._average.copy_to(task)

    def averaged(self, task: forge.TaskModule, part: nn.Module) -> nn.Module:
        """Return a part of the task with its averaged weights; before the first of them, with its own."""
        average = self._average
        if average.task is not task:  # a copy that a probe runs
            return without_hooks(part).requires_grad_(False)
        if average.scattered or (not average.sharded and any(map(is_distributed, part.parameters()))):
            raise StackError(
                f"task.averaged: layers are divided over ranks, and {self.name} averages each rank's part. Train with "
                "a strategy that computes them whole on every rank."
            )
        if id(part) not in self._names:
            names = [name for name, module in task.named_modules() if module is part]
            if not names:
                kind = type(part).__name__
                raise TaskError(f"{type(task).__name__}.averaged takes a part of the task; this {kind} is none.")
            self._names[id(part)] = names[0]
            if not average.count and self._begins_when_asked:
                average.take(1.0)
        return average.target(self._names[id(part)])

    def averages_buffers(self) -> bool:
        """Whether buffers are averaged too."""
        raise NotImplementedError

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        if trainer.verb == "fit":  # other verbs keep the last fit's average for apply_to
            if any(entry.has_modes for entry in trainer.optimizers.entries.values()):
                raise StackError(
                    f"{self.name} averages the weights of training, but a schedule-free optimizer (with train() and "
                    f"eval()) evaluates an average of its own. Remove {self.name}, or use another optimizer."
                )
            self._average, self._names = Average(trainer.task, self.averages_buffers()), {}
            missing = any(parameter.is_meta for parameter in trainer.task.parameters())
            self._average.scattered = bool(trainer.env.all_max([missing])[0])
            if isinstance(trainer.model, FSDPModule) and trainer.env.data_world == trainer.env.world:
                self._average.sharded = dict(trainer.task.named_parameters())
                self._average.device = trainer.env.device
                sharding = [plugin.name for plugin in trainer.stack if "sharding" in plugin.provides]
                computed = {trainer.env.computes_in.get(name) for name in sharding}
                self._average.dtype = torch.bfloat16 if "bf16" in computed else None
            self._start = updates_of(self.config.start, trainer, f"{self.name}.start")
            self._announced = False
            self._begins_when_asked = self.begins_when_asked and not self._start
            planned = trainer.planned_updates
            if planned and self._start >= planned:
                text = "%s.start is %d updates, but the run has only %d: nothing will be averaged."
                logger.warning(text, self.name, self._start, planned)

    @forge.hookimpl
    def forge_inspect_grads(self) -> None:
        if self._average.frozen:
            self._average.include_thawed()

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self, trainer: forge.Run) -> Generator[None, Any, Any]:
        if trainer.verb != "fit" or not self._average.count:
            return (yield)
        if not self._announced:
            logger.info("%s: evaluates the averaged weights from update %d on.", self.name, trainer.progress.update)
            self._announced = True
        with self.in_place(trainer):
            return (yield)

    @forge.hookimpl(wrapper=True)
    def forge_export(self, trainer: forge.Run, path: Path) -> Generator[None, Any, Any]:
        if not self._average.count:
            text = "%s averaged nothing in this run: %s holds the trained weights. %s.start is %d updates"
            text += ": set it earlier, or train longer."
            logger.warning(text, self.name, path.name, self.name, self._start)
            return (yield)
        logger.info("%s: %s holds the averaged weights.", self.name, path.name)
        with self.in_place(trainer, over=True), noted_as_average(self.name):
            return (yield)

    def in_place(self, trainer: forge.Run, over: bool = False) -> AbstractContextManager[None]:
        """Hold the averaged weights in the task inside the `with`; `over`: training has ended."""
        return self._average.in_place()

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return self._average.state_dict()

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        self._average.load_state_dict(state)


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy in the same layout, at least float32."""
    low = tensor.is_floating_point() and tensor.itemsize < 4
    return tensor.detach().to(torch.float32 if low else tensor.dtype, copy=True)


def _tensors(task: nn.Module) -> dict[str, Tensor]:
    return {**dict(task.named_parameters()), **dict(task.named_buffers())}


def _owner(task: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    module, _, buffer = name.rpartition(".")
    return task.get_submodule(module)._buffers, buffer
