"""Data parallel training with divided optimizer state (ZeRO)."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

import forge
from forge.contract.task import Build
from forge.distributed import DistributedEnv
from forge.distributed.replicated import Replicated
from forge.distributed.sparse import refuse_sparse
from forge.errors import RecipeError, StackError
from forge_cluster.zero.gradients import OwnedGradients

COUPLED = ("LBFGS", "Prodigy", "DAdapt", "DAdaptAdam", "DAdaptSGD", "DAdaptLion", "DAdaptAdan", "DAdaptAdaGrad")
"""Optimizers whose step of one parameter depends on all others."""


class Zero(Replicated):
    """Train on several processes that each hold a copy of the model and a part of the optimizer's state (ZeRO).

    As `ddp`, but every parameter has one rank that owns it: the largest first, each to the rank with the fewest bytes.
    The owner alone keeps the optimizer's state of the parameter and steps it; then all ranks get the new weights.
    `stage=1` divides the optimizer's state. `stage=2` also divides gradients: each is summed on the rank that owns it,
    during the backward pass of every micro-batch, and kept nowhere else.

    Parameters are divided as whole tensors, so the optimizer sees ordinary ones: any class works that steps each
    parameter by its own gradient and skips those without one, also where it needs the whole matrix (Muon, Shampoo,
    Adafactor, LAMB). Weights equal those of one process. A single tensor that is larger than a rank's part makes the
    parts uneven: then use `fsdp`, which divides every tensor, and the parameters too.

    When to use it: if the model and its gradients fit on every device but Adam's state does not, or if `fsdp` does not
    fit the optimizer or the model.

    What you see: nothing new. Checkpoints are complete, written by all ranks together, and can be continued with `ddp`,
    `fsdp` or one process.

    Together with: `clip`, `ema`, `accumulate`, `schedule`, `guard` and `amp` work as with `ddp`. With stage 2 a loss
    scaler (fp16) and `sam` are refused, and plugins that look at single gradients (`monitor`) see those of their rank.
    An optimizer with a closure, one with two modes (schedule-free), or one whose step of one parameter depends on all
    others (Prodigy, or one that clips by their norm) is refused.

    ::

        forge fit quickstart --nproc 2 -p zero trainer.max_epochs=1
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Replicated.Config):
        stage: int = 1
        "1: divide the optimizer's state. 2: divide gradients too."

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]
    axes = {"data": "samples", "*": "positions"}

    def __init__(self, *first: str | None, **values: Any):
        super().__init__(*first, **values)
        if self.config.stage not in (1, 2):
            raise RecipeError(f"zero.stage is {self.config.stage}; it must be 1 or 2. To divide parameters, use fsdp.")
        if self.config.stage == 2:
            self.conflicts = {
                "grad_scaler": "Use amp.dtype=bf16, which needs none, or zero.stage=1.",
                "second_pass": "Use zero.stage=1: sam needs all gradients on every rank.",
            }
            for name in ("compress", "static_graph", "find_unused", "bucket_mb"):
                if getattr(self.config, name):
                    raise RecipeError(f"zero.{name} belongs to zero.stage=1, whose gradients torch's DDP averages.")
        self._owners: dict[int, int] = {}
        self._sums: OwnedGradients | None = None
        "With stage 2 on several ranks."
        self._restores = 0

    # -- build --------------------------------------------------------------------------------------------------------

    def make_env(self, trainer: forge.Run) -> DistributedEnv:
        env = OwningEnv(trainer.device, trainer=trainer, backend=self.config.backend, watchdog=self.config.watchdog)
        env.is_divided = env.world > 1
        if env.is_divided and self.config.stage == 2:
            env.parts = dist.group.WORLD
        return env

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, build: Build, phase: str) -> None:
        super().forge_build_model(trainer, build, phase)
        env = trainer.env
        if phase != "parallel" or env.world == 1 or trainer.verb != "fit":
            return
        assert isinstance(env, OwningEnv)
        named = dict(build.task.named_parameters())
        self._owners = owners_of(named.values(), env.world)
        env.elsewhere = {name for name, p in named.items() if self._owners[id(p)] != env.rank}
        if self.config.stage == 2:
            refuse_sparse(build.task, "zero.stage=2")
            self._sums = OwnedGradients(self._owners, env.rank, env.world)

    def wrapped(self, task: nn.Module) -> nn.Module:
        if self.config.stage == 1 or self._env is None or self._env.world == 1:
            return super().wrapped(task)
        self.note_trained(task)
        assert self._inner is not None
        return self._inner

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        super().forge_start(trainer)
        if trainer.verb == "fit" and trainer.env.world > 1:
            for entry in trainer.optimizers.entries.values():
                _refuse_undividable(entry)
            self._drop_others(trainer)
            self._restores = trainer.restores

    # -- a step -------------------------------------------------------------------------------------------------------

    @forge.hookimpl(wrapper=True)
    def forge_forward(self, step: forge.Step) -> Generator[None, Any, Any]:
        if self._sums is None:
            return (yield from super().forge_forward(step))
        self._sums.watch(step.trainer.task if step is step.trainer.step else None)
        return (yield)

    @forge.hookimpl
    def forge_finalize_grads(self, step: forge.Step) -> None:
        super().forge_finalize_grads(step)
        if self._sums is not None:
            self._sums.finish()

    @forge.hookimpl(wrapper=True)
    def forge_optimizer_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        trainer = step.trainer
        if trainer.env.world == 1:
            return (yield)
        if self._restores != trainer.restores:
            self._drop_others(trainer)
            self._restores = trainer.restores
        owned: list[list[nn.Parameter]] = [[] for _ in range(trainer.env.world)]
        for parameter in step.parameters():
            if parameter.requires_grad:
                owned[self._owners[id(parameter)]].append(parameter)
        for rank, parameters in enumerate(owned):
            if rank != trainer.env.rank:
                for parameter in parameters:
                    parameter.grad = None  # an optimizer skips parameters without one
        updated = yield
        if updated:
            assert self._env is not None
            for rank, parameters in enumerate(owned):
                if parameters:
                    self._env.copy_from(rank, [parameter.detach() for parameter in parameters])
        return updated

    def _drop_others(self, trainer: forge.Run) -> None:
        """Drop the state of parameters that other ranks step, which an optimizer makes early or a restore brings."""
        rank = trainer.env.rank
        for optimizer in trainer.optimizers.values():
            for parameter in [p for p in optimizer.state if self._owners.get(id(p), rank) != rank]:
                del optimizer.state[parameter]

    @forge.hookimpl
    def forge_end(self) -> None:
        if self._sums is not None:
            self._sums.close()
        self._owners, self._sums = {}, None
        super().forge_end()


class OwningEnv(DistributedEnv):
    """Several processes of which each keeps the optimizer's state of some parameters."""

    elsewhere: Set[str] = frozenset()
    "Parameters whose optimizer state other ranks keep."

    def holds(self, path: tuple[str | int, ...]) -> bool:
        return path[0] != "optimizers" or "state" not in path or self.elsewhere.isdisjoint(map(str, path))


def owners_of(parameters: Iterable[nn.Parameter], ranks: int) -> dict[int, int]:
    """Return the rank that owns each parameter, by id: the largest first, each to the least loaded rank."""
    loads, owners = [0] * ranks, {}
    for parameter in sorted(parameters, key=lambda p: -p.nbytes):
        owner = owners[id(parameter)] = loads.index(min(loads))
        loads[owner] += parameter.nbytes
    return owners


def _refuse_undividable(entry: Any) -> None:
    optimizer, kind = entry.optimizer, type(entry.optimizer).__name__
    why = None
    if entry.needs_closure or kind in COUPLED:
        why = "steps all parameters by what it knows of all of them"
    elif entry.has_modes:
        why = "has other weights for evaluation, which its state of every parameter is needed for"
    elif getattr(optimizer, "max_norm", None) is not None:
        why = "clips by the norm of all gradients in its step (use -p clip instead of max_norm)"
    elif not isinstance(getattr(optimizer, "state", None), Mapping):
        why = "does not keep its state by parameter"
    if why is not None:
        raise StackError(f"zero: {kind} {why}, so its state cannot be divided. Use ddp, or another optimizer.")
