"""Data parallel training with a copy of the model on every rank, for the strategies that hold one."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from forge import torch_internals as internals
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.run import Run
from forge.contract.step import Step
from forge.contract.task import Build
from forge.distributed import DistributedEnv
from forge.distributed.divided_norms import warn_of_divided_batches
from forge.distributed.same_samples import refuse_different_samples, tell_different_weights
from forge.errors import RecipeError, StackError, TaskError
from forge.optim.sharded import divided_along
from forge.util.patterns import listed

logger = logging.getLogger("forge")

HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


def check_positive(plugin: Plugin, *names: str) -> None:
    """Refuse options that are not above 0."""
    for name in names:
        value = getattr(plugin.config, name)
        if value is not None and value <= 0:
            raise RecipeError(f"{plugin.name}.{name} is {value:g}; it must be above 0.")


class Replicated(Plugin):
    """Training on several processes that each hold a copy of the model, with torch's DistributedDataParallel."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        backend: str | None = None
        "Communication backend: nccl, gloo, ...; null: chosen by device."
        bucket_mb: float | None = None
        "Size in MiB of the buckets that are sent during the backward pass; null: 25, the first one 1."
        static_graph: bool = False
        "Promise that every step uses the same parameters in the same way: slightly faster, and remat may be reentrant."
        find_unused: bool | None = None
        "Look for parameters without a gradient in every step; null: only with several optimizers."
        bucket_view: bool = True
        "Make gradients views into the buckets, which saves one copy of them in memory."
        compress: Literal["bf16", "fp16"] | None = None
        "Send gradients in a shorter type: half the traffic, rounded sums."
        split_graphs: bool | None = None
        "Split compiled code at bucket ends, to send buckets during the backward pass; null: with several ranks."
        sync_batchnorm: bool = False
        "Compute BatchNorm's statistics over the batches of all ranks."
        watchdog: float = 120.0
        "Seconds without progress after which a run counts as stalled: it reports which rank waits, and ends."

    config: Config
    provides = ("strategy",)
    axes = {"data": "samples", "*": "positions experts"}
    cures = {
        "expected to have finished reduction in the prior iteration": "Some parameters were not used in the last step, "
        "so they have no gradients. Set {name}.find_unused=true, or freeze them."
    }

    def __init__(self, *first: str | None, **values: Any):
        super().__init__(*first, **values)
        check_positive(self, "bucket_mb", "watchdog")
        self._cleanup = ExitStack()
        self._reset()

    def _reset(self) -> None:
        """Reset the state of one run."""
        self._cleanup.close()
        self._env: DistributedEnv | None = None
        self._inner: nn.Module | None = None
        self._model: Synchronised | None = None
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] = []
        self._finds_unused = self._failed = False

    # -- build --------------------------------------------------------------------------------------------------------

    @hookimpl
    def forge_configure(self, trainer: Run) -> None:
        trainer.mesh_axes["data"] = 0

    @hookimpl
    def forge_setup_env(self, trainer: Run) -> DistributedEnv:
        self._reset()
        self._env = self.make_env(trainer)
        split = self._env.world > 1 if self.config.split_graphs is None else self.config.split_graphs
        self._cleanup.enter_context(internals.dynamo_config.patch(optimize_ddp=split))
        return self._env

    @hookimpl
    def forge_build_model(self, trainer: Run, build: Build, phase: str) -> None:
        if phase == "surgery" and self.config.sync_batchnorm:
            if trainer.env.device.type == "cpu":
                why = "torch's SyncBatchNorm does not run on the CPU"
                raise StackError(f"{self.name}.sync_batchnorm needs GPUs: {why}.")
            nn.SyncBatchNorm.convert_sync_batchnorm(build.task)
        elif phase == "parallel":
            tell_different_weights(trainer)
            trainer.env.copy_from_first(build.task)
            self._inner = build.model
            if trainer.verb == "fit":
                build.model = self.wrapped(build.task)

    @hookimpl
    def forge_start(self, trainer: Run) -> None:
        """Compare the data of all ranks. Rebuild the wrapper for several optimizers, which are known only now."""
        refuse_different_samples(trainer)
        warn_of_divided_batches(trainer, self.name)
        if trainer.verb == "fit" and len(trainer.optimizers) > 1 and self.config.find_unused is None:
            logger.info("%s: several optimizers, so every step searches for parameters without a gradient.", self.name)
            self._finds_unused = True
            trainer.replace_model(self.wrapped(trainer.task))

    def make_env(self, trainer: Run) -> DistributedEnv:
        """Return the environment of this process."""
        config = self.config
        return DistributedEnv(trainer.device, trainer=trainer, backend=config.backend, watchdog=config.watchdog)

    # -- a step -------------------------------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def forge_forward(self, step: Step) -> Generator[None, Any, Any]:
        model, trainer = self._model, step.trainer
        if model is not None and trainer.env.world > 1:
            # gradients are sent with the window's last micro-batch; a forward outside of the step has none
            sync = step.micro == len(step.window) - 1 and step is trainer.step
            if model.require_backward_grad_sync is not sync:
                model.require_backward_grad_sync = sync
        return (yield)

    @hookimpl
    def forge_finalize_grads(self, step: Step) -> None:
        """Refuse gradients that torch has not averaged, before they reach the weights; torch tells in the next step."""
        if self._model is None or step.trainer.env.world == 1:
            return
        try:
            self._model._check_reducer_finalized()
        except RuntimeError as error:
            trained = [name for name, p in self._averaged(step.trainer.task).items() if p.requires_grad]
            numbers = re.findall(r"\d+", str(error).rpartition("did not receive grad for rank")[2].partition("\n")[0])
            missing = [trained[int(number)] for number in numbers[1:] if int(number) < len(trained)]
            raise TaskError(
                f"{self.name}: {listed(missing) if missing else 'some parameters'} got no gradient on rank "
                f"{step.trainer.env.rank}, so torch averaged none. Set {self.name}.find_unused=true, or freeze them."
            ) from error

    @hookimpl
    def forge_step_end(self, step: Step) -> None:
        """Rebuild the wrapper if parameters were frozen or thawed: it would not average new ones."""
        if [p.requires_grad for p in self._parameters] != self._trained:
            logger.info("%s: the set of trained parameters has changed, so the wrapper is rebuilt.", self.name)
            step.trainer.replace_model(self.wrapped(step.trainer.task))

    # -- the end ------------------------------------------------------------------------------------------------------

    @hookimpl
    def forge_exception(self) -> None:
        self._failed = True

    @hookimpl
    def forge_end(self) -> None:
        env, failed = self._env, self._failed
        self._reset()
        if env is not None:
            env.close(failed)

    # -- the wrapper --------------------------------------------------------------------------------------------------

    def wrapped(self, task: nn.Module) -> nn.Module:
        """Return what is called in training: the model with its gradients averaged."""
        config, inner = self.config, self._inner
        assert inner is not None
        self.note_trained(task)
        if not any(p.requires_grad for p in self._averaged(task).values()):
            return inner
        self._refuse_detail()
        divided = {id(p) for p in self._divided(task)}
        if divided:
            internals.leave_to_others(inner, [name for name, p in inner.named_parameters() if id(p) in divided])
        self._model = Synchronised(
            inner,
            bucket_cap_mb=config.bucket_mb,
            find_unused_parameters=bool(config.find_unused) or self._finds_unused,
            gradient_as_bucket_view=config.bucket_view,
            static_graph=config.static_graph,
            init_sync=False,  # rank 0's weights are everywhere already
        )
        if self._env is not None and self._env.world == 1:
            self._model.require_backward_grad_sync = False  # one rank: nothing to average
        elif config.compress is not None:
            self._model.register_comm_hook(None, HOOKS[config.compress])
        return self._model

    def _averaged(self, task: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters that all ranks hold, by name."""
        divided = {id(p) for p in self._divided(task)}
        return {name: p for name, p in task.named_parameters() if id(p) not in divided}

    def _divided(self, task: nn.Module) -> list[nn.Parameter]:
        assert self._env is not None
        return divided_along(task.parameters(), self._env.mean_axes)

    def note_trained(self, task: nn.Module) -> None:
        """Note which parameters train; after an update in which that has changed, the wrapper is made anew."""
        self._parameters = list(task.parameters())  # compared after every update without walking the modules
        self._trained, self._model = [p.requires_grad for p in self._parameters], None

    def _refuse_detail(self) -> None:
        """Refuse what ends in a segmentation fault of torch's DDP, seen with torch 2.10 and 2.15."""
        if dist.get_debug_level() == dist.DebugLevel.DETAIL and dist.get_backend() == "gloo":
            raise StackError(
                f"TORCH_DISTRIBUTED_DEBUG=DETAIL crashes torch's DistributedDataParallel over gloo, which {self.name} "
                "uses. Set TORCH_DISTRIBUTED_DEBUG=INFO."
            )


class Synchronised(DistributedDataParallel):
    """DDP for training; other stages run the module itself, since they average nothing."""

    def forward(self, batch: Any, stage: str, name: str | None = None) -> Any:
        if stage != "train":
            return self.module(batch, stage, name)
        return super().forward(batch, stage, name)
