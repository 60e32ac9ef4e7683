"""Sharded data parallel training."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

import forge
from forge.contract.axes import DATA
from forge.contract.task import Build
from forge.distributed import DistributedEnv
from forge.distributed.agreed_use import AgreedUse
from forge.distributed.divided_norms import warn_of_divided_batches
from forge.distributed.replicated import check_positive
from forge.distributed.same_samples import refuse_different_samples, tell_different_weights
from forge.distributed.shards import Shards, refuse_unshardable
from forge.distributed.sparse import refuse_sparse
from forge.env import pick_device
from forge.errors import RecipeError, StackError, TaskError
from forge.optim.sharded import divided_along, sum_gradients
from forge.rng import RNGState, seed_all
from forge.util.patterns import MANY, as_list, listed
from forge_plugins.fsdp.blocks import sharded_blocks
from forge_plugins.fsdp.materialise import Materialiser, has_meta, inside_out

logger = logging.getLogger("forge")
COUNTS_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether torch can count the gradients that a rank has not as zeros: from 2.15 on."""

DTYPES = {"bf16": torch.bfloat16}
BOTH = "cpu:gloo,cuda:nccl"
"""Backends for shards on the host: the norm of their gradients is summed there."""


class FSDP(forge.Plugin):
    """Train on several processes that shard parameters, gradients and optimizer state, by torch's FSDP2.

    Use it for models too large for one device. Start it with `forge fit RECIPE --nproc 4 -p fsdp`, with torchrun, or
    with srun. As with `ddp`, the batch size of a recipe is the global one, and every rank trains on its share. A
    block's parameters are gathered from all ranks just before it runs, and freed after it; each rank gets the sum of
    its own part of the gradients. So no rank holds more than its part and the running block. `blocks` names the blocks,
    by class (`TransformerBlock`) or by name (`encoder.layers.*`); by default the repeated blocks are used: modules of
    one class in one ModuleList or Sequential. Parameters outside of all blocks are one more unit, gathered during the
    whole step. Gradients are sent once per update, with the last micro-batch of its window; until then each rank sums
    them in full. `reduce=micro` sends them with every micro-batch, so that each rank keeps only its part: 1/n of the
    bytes. In a window of m micro-batches it sends gradients m times: 3 m times the parameters, in place of 2 m + 1.

    `mixed_precision=bf16` gathers parameters and computes in bfloat16, while shards, optimizer and gradient sums stay
    in float32: half the traffic. The floats of a batch are cast as well. `amp` computes in bf16 too, with losses in
    float32, but keeps the cast tensors from forward to backward. `reshard=false` keeps gathered parameters until the
    backward pass: more memory, a third less traffic. `offload` keeps shards and optimizer on the host. `replicate=2`
    makes two groups of ranks with all parameters each, for a fast network inside groups and a slow one between them. A
    loss scaler, and therefore fp16, is refused. With `compile`, give it the same blocks: a graph of the whole step
    breaks at every block.

    `meta` makes the task on the meta device, without memory, and initialises weights block by block, by each module's
    `reset_parameters()` and then the task's `init_weights(module)`, if defined. In Python: `with torch.device("meta"):
    task = Task()`. Without `init_weights` the weights equal those of a task made normally with the same seed. A module
    with neither is refused.

    The task may call its modules only in its steps, where all ranks do. From `configure_optimizers` on, a parameter is
    a DTensor of the full shape. One without a dimension, as CLIP's `logit_scale`, stays whole on every rank; its
    gradient is averaged once per update. After a fit the task has plain parameters again, with all weights, on every
    rank; `gather=false` leaves each rank its shards, for weights that fit on no rank: they are in
    RUN/weights.safetensors. After an error on several ranks the shards remain too.

    A parameter must have a gradient on all ranks or on none: else the update is refused. For experts that no sample may
    choose, `find_unused` asks all ranks in every update, and the weights are those of one process. All ranks call the
    same blocks in the same order: a layer that a rank skips at random is refused.

    Together with: `amp` in bf16 computes losses in float32, but keeps what it casts from forward to backward. A loss
    scaler, and so fp16, is refused. For `compile`, name the same blocks, because a graph of the whole step breaks at
    every block.

    ::

        forge fit quickstart --nproc 2 -p fsdp trainer.max_epochs=1
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        blocks: str | list[str] | None = None
        "Units of sharding: classes or patterns of module names; null: the task's repeated blocks."
        min_size: int = 0
        "Blocks with fewer parameters than this are not separate units."
        mixed_precision: Literal["bf16"] | None = None
        "Gather and compute in this type; shards, optimizer and gradient sums keep theirs."
        reshard: bool = True
        "Free a block's gathered parameters after its forward, and gather them again for its backward."
        reduce: Literal["window", "micro"] = "window"
        "When ranks sum gradients: once per update, whole until then, or with each micro-batch, of which shards remain."
        offload: bool = False
        "Keep shards, gradients and optimizer state in host memory."
        find_unused: bool = False
        "Ask all ranks in every update which parameters have a gradient: for experts that no sample may choose."
        replicate: int = 1
        "Number of groups of ranks that hold all parameters each (hybrid sharding)."
        meta: bool = False
        "On the command line, make the task on the meta device and initialise it block by block."
        gather: bool = True
        "Gather all weights into the task at the end, on every rank; false: keep the shards."
        backend: str | None = None
        "Communication backend: nccl, gloo, ...; null: chosen by device."
        watchdog: float = 120.0
        "Seconds without progress after which a run counts as stalled: it reports which rank waits, and ends."

    config: Config
    provides = ("strategy", "sharding")
    axes = {"data": "samples", "shard": "samples weights", "*": "positions experts matrices"}
    cures = {
        "processes": "-p {name} if the model is too big for one device",
        "meta": "{name}.meta=false",
        "out of bounds for storage of size 0": "{name} has freed parameters that this backward pass needs. A block "
        "returned a view (.view, .flatten, .transpose), and it was changed in place (x += y): torch's FSDP does not "
        "see its gradient then. Write x = x + y, or set {name}.reshard=false.",
    }
    conflicts = {"grad_scaler": "Use amp.dtype=bf16, which needs none."}

    def __init__(self, *first: str | list[str] | None, **values: Any):
        super().__init__(*first, **values)
        config = self.config
        for name, least in (("min_size", 0), ("replicate", 1)):
            if getattr(config, name) < least:
                raise RecipeError(f"fsdp.{name} is {getattr(config, name)}; it must be at least {least}.")
        check_positive(self, "watchdog")
        if config.blocks is not None and not as_list(config.blocks):
            raise RecipeError("fsdp.blocks is an empty list. Name some blocks, or leave it out to have them found.")
        if config.find_unused and not COUNTS_UNUSED:
            raise RecipeError(
                f"fsdp.find_unused needs torch 2.15, whose FSDP counts missing gradients as zeros; this is torch "
                f"{torch.__version__}. Install it, or use ddp with ddp.find_unused=true."
            )
        if config.meta:
            self.provides = (*self.provides, "allocation")
        self._begin()

    def _begin(self) -> None:
        """Reset the state of one run."""
        self._env: ShardedEnv | None = None
        self._shards: Shards | None = None
        self._error: BaseException | None = None
        self._reduces = True
        cure = "Set fsdp.find_unused=true" if COUNTS_UNUSED else "Use ddp with ddp.find_unused=true"
        self._use = AgreedUse(self.name, f"{cure}, or freeze them.")

    # -- build --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        trainer.mesh_axes["shard"] = 0
        if self.config.replicate > 1:
            trainer.mesh_axes["data"] = self.config.replicate

    @forge.hookimpl
    def forge_setup_env(self, trainer: forge.Run) -> DistributedEnv:
        self._begin()
        config = self.config
        backend = config.backend
        if backend is None and config.offload and pick_device(trainer.device).type == "cuda":
            backend = BOTH
        self._env = ShardedEnv(trainer.device, trainer=trainer, backend=backend, watchdog=config.watchdog)
        if config.mixed_precision:
            self._env.computes_in[self.name] = config.mixed_precision
        return self._env

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, build: Build, phase: str) -> None:
        if phase != "parallel":
            return
        assert self._env is not None
        task, env = build.task, self._env
        refuse_unshardable(task, self.name)
        if trainer.verb == "fit":
            refuse_sparse(task, self.name)
        blocks = sharded_blocks(task, as_list(self.config.blocks), self.config.min_size)
        self._shards = Shards(task)
        if has_meta(task):
            self._initialise_and_shard(task, blocks, env)
        else:
            tell_different_weights(trainer)
            env.copy_from_first(task)
            for block in blocks.values():
                self._shards.add(block, self._options(block, env))
        self._shards.add(build.model, self._options(build.model, env, root=True))
        if env.mean_world > 1 and trainer.verb == "fit":
            self._shards.note_use()
        build.model.register_forward_hook(self._after_forward)
        self._log_units(task, blocks, env)

    def _initialise_and_shard(self, task: nn.Module, blocks: dict[str, nn.Module], env: ShardedEnv) -> None:
        """Initialise a task from the meta device; no more than one block is whole at a time.

        Use the seed that was set last, as a task made normally would have been made right after it.
        """
        assert self._shards is not None
        materialiser, ends = Materialiser(task), {id(block) for block in blocks.values()}
        rng, seed = RNGState.capture(env.device), env.broadcast(torch.initial_seed())
        try:
            seed_all(seed)
            for module in inside_out(task):
                materialiser.fill(module)
                if id(module) in ends:
                    materialiser.settle(env.device, module)
                    env.copy_from_first(module)
                    self._shards.add(module, self._options(module, env))
        finally:
            rng.restore(env.device)
        materialiser.settle(env.device, task)
        env.copy_from_first(task)

    def _options(self, module: nn.Module, env: ShardedEnv, root: bool = False) -> dict[str, Any]:
        config = self.config
        options: dict[str, Any] = {"ignored_params": {*divided_along(module.parameters(), env.mean_axes)}}
        if config.mixed_precision is not None:
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=DTYPES[config.mixed_precision],
                reduce_dtype=torch.float32,
                output_dtype=torch.float32 if root else None,
            )
        if config.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=env.device.type == "cuda")
        # None: keep the outermost unit until backward, since it would be gathered again at once
        reshard = None if root and config.reshard else config.reshard
        return {"mesh": env.data_mesh, "reshard_after_forward": reshard, **options}

    def _log_units(self, task: nn.Module, blocks: dict[str, nn.Module], env: ShardedEnv) -> None:
        sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks.values()]
        rest = sum(parameter.numel() for parameter in task.parameters()) - sum(sizes)
        shards = env.along(env.shard_axes).size()
        if not blocks and env.is_main:
            text = "fsdp: %s has no blocks, so all of its %s parameters are gathered at once. Name some, by class or "
            logger.warning(text + "by name: fsdp.blocks=...", type(task).__name__, f"{rest:,}")
            return
        text = "fsdp: %s parameters in %d shards; sharded separately: %s, and the rest, %s parameters, as one."
        logger.info(text, f"{sum(sizes) + rest:,}", shards, listed(blocks, MANY), f"{rest:,}")

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        refuse_different_samples(trainer)
        warn_of_divided_batches(trainer, self.name)
        entries = trainer.optimizers.entries.values() if trainer.verb == "fit" and trainer.env.world > 1 else ()
        if any(isinstance(entry.optimizer, torch.optim.LBFGS) for entry in entries):
            raise StackError(
                "fsdp: LBFGS joins all parameters into one vector, which torch cannot do with shards of every size. "
                "Use ddp, or another optimizer."
            )

    @forge.hookimpl(wrapper=True)
    def forge_forward(self, step: forge.Step) -> Generator[None, Any, Any]:
        if step.stage == "train" and step.is_last_micro is not self._reduces:
            self._reduce(step.trainer.model, step.is_last_micro)
        return (yield)

    def _reduce(self, model: Any, now: bool) -> None:
        """Set whether the next backward sums gradients over the ranks, or accumulates them: whole, or as shards, which
        copies of the shards sum at the end."""
        self._reduces = now
        if self.config.reduce == "micro":
            model.set_requires_all_reduce(now)
        else:
            model.set_requires_gradient_sync(now)
            model.set_is_last_backward(now)
        if not self.config.reshard:
            model.set_reshard_after_backward(now)

    @forge.hookimpl
    def forge_finalize_grads(self, step: forge.Step) -> None:
        env, shards = self._env, self._shards
        assert env is not None
        assert shards is not None
        if env.mean_world == 1:
            return
        task, called = step.trainer.task, [*shards.called]
        others = {id(parameter) for parameter in divided_along(task.parameters(), env.mean_axes)} - shards.divided
        named = [(name, parameter) for name, parameter in task.named_parameters() if id(parameter) not in others]
        scalars = [parameter for _, parameter in named if not parameter.ndim]
        used = {*shards.used, *(id(scalar) for scalar in scalars if scalar.grad is not None)}
        shards.used.clear()
        shards.called.clear()

        def gather(own: list[bool]) -> list[list[bool]]:
            masks, calls = zip(*env.gather((own, called)), strict=True)
            refuse_other_calls(task, shards.modules, calls)
            return list(masks)

        if self.config.find_unused:
            masks = gather([id(parameter) in used for _, parameter in named])
            used = {id(parameter) for (_, parameter), *each in zip(named, *masks, strict=True) if any(each)}
        else:
            self._use.check(named, used, gather)
        for _, parameter in named:
            if parameter.requires_grad and id(parameter) not in used:
                parameter.grad = None  # as in one process, where torch gave zeros
        sum_gradients([s for s in scalars if id(s) in used], env.along(env.mean_axes).get_group(), 1 / env.mean_world)

    def _after_forward(self, *_: Any) -> None:
        """Reshard after a forward without a backward: nothing else frees the gathered parameters."""
        if not torch.is_grad_enabled() and self._shards is not None:
            self._shards.reshard()

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self) -> Generator[None, Any, Any]:
        """Reshard around evaluation: a plugin may write other weights into the shards."""
        assert self._shards is not None
        self._shards.reshard()
        try:
            return (yield)
        finally:
            self._shards.reshard()
            self._shards.called.clear()

    # -- the end ------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_exception(self, error: BaseException) -> None:
        self._error = error

    @forge.hookimpl
    def forge_end(self) -> None:
        env, shards, error = self._env, self._shards, self._error
        self._begin()
        if env is None:
            return
        try:
            if shards is not None:
                # on several ranks the others may not answer after an error
                shards.remove(gather=env.world == 1 or (error is None and self.config.gather))
        finally:
            env.close(error is not None)


def refuse_other_calls(task: nn.Module, modules: Sequence[Any], calls: Sequence[list[int]]) -> None:
    """Refuse a step in which ranks called different units: torch gathered parts of different parameters as one."""
    for rank, other in enumerate(calls):
        place = next((at for at, (a, b) in enumerate(zip_longest(calls[0], other)) if a != b), None)
        if place is not None:
            names = {id(module): name or type(task).__name__ for name, module in task.named_modules()}
            first, second = (
                names.get(id(modules[each[place]]), "another module") if place < len(each) else "none"
                for each in (calls[0], other)
            )
            raise TaskError(
                f"fsdp: call {place + 1} of a block is {first} on rank 0 and {second} on rank {rank}. All ranks gather "
                "a block together, so they must call the same blocks in the same order. Make the choice alike on all "
                "ranks, or call every block and multiply by 0 what is dropped, or use ddp with ddp.find_unused=true."
            )


class ShardedEnv(DistributedEnv):
    """Several processes that shard one model."""

    inference_mode = False

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes along which parameters are divided: all along which gradients are averaged, but for copies."""
        return tuple(axis for axis in self.mean_axes if axis != DATA)

    @property
    def data_mesh(self) -> Any:
        """The part of the mesh along which parameters are divided and copied."""
        assert self.mesh is not None
        divided, copies = self.along(self.shard_axes), self.mesh.mesh_dim_names or ()
        if DATA not in copies or self.mesh[DATA].size() == 1:
            return divided
        return self.mesh[(DATA, *(divided.mesh_dim_names or ()))]

    def place(self, task: nn.Module) -> None:
        """Move the task to the device; one from the meta device gets its memory later, block by block."""
        if not has_meta(task):
            super().place(task)
