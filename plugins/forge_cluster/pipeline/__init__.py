"""Pipeline parallelism."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import forge
from forge.contract.task import Build
from forge.data.accumulation_windows import exact, weigh_loss
from forge.distributed import DistributedEnv
from forge.distributed.agreed_use import AgreedUse
from forge.distributed.replicated import check_positive
from forge.distributed.same_samples import refuse_different_samples, tell_different_weights
from forge.distributed.shards import Place, Shards, places_of, refuse_unshardable
from forge.distributed.sparse import refuse_sparse
from forge.errors import ForgeError, RecipeError, StackError, TaskError
from forge.metrics.torchmetrics import restored_after
from forge.optim.sharded import settle_gradients, sum_gradients
from forge.rng import RNGState, combine_seeds
from forge.util.blocks import is_tied
from forge.util.patterns import MANY, listed
from forge_cluster.pipeline.cutting import Cutting, blocks_of, bounds_of
from forge_cluster.pipeline.last_metrics import LastMetrics
from forge_cluster.pipeline.microbatches import cut_batch
from forge_cluster.pipeline.running import BlockCalls, StageEnded
from forge_cluster.pipeline.scheduling import Schedule, Schedules, ranks_of
from forge_cluster.pipeline.staging import StagedEnv, StagedModel, with_metrics, with_names

logger = logging.getLogger("forge")

AXIS = "pipe"


class Pipeline(forge.Plugin):
    """Divide a model's blocks among ranks that pass activations on, with torch.distributed.pipelining.

    Each rank holds the blocks of its stage, their gradients and their optimizer state. A micro-batch is cut into
    `microbatches` equal parts along its samples; while one stage computes a part, the others compute other parts, in
    the order of `schedule`. Blocks are the children of the largest list of repeated blocks, or of the largest
    Sequential, cut evenly by parameters; `split` names those that begin a stage instead.

    The task does not change. Every rank runs its `training_step`, and only the blocks of the own stage are computed:
    what comes before and after blocks, and further arguments of blocks (masks, positions, conditions), are computed
    where they are needed. So embedding and head are on every rank, and their gradients are summed. What the step draws
    outside of blocks is the same on all ranks of a pipeline. Blocks must be called once each, one after the other, and
    pass on one tensor, which they may return in a tuple. A skip from an early block to a late one is refused, since its
    value is on another rank. The loss must be a mean over samples, or over what `num_items` counts.

    With more ranks than `stages` there are several pipelines, which divide batches as `ddp` does and average their
    gradients at the end of an update. With `shard` the ranks that hold the same stage divide its weights and optimizer
    state between updates: they gather the weights, block by block, before the first micro-batch of an update, and each
    keeps its part of the averaged gradients at the end. An update sends as many bytes as without.

    When to use it: for deep models between hosts with slow links, since only activations of one boundary are sent.
    Inside a host, prefer `fsdp`.

    What you see: the blocks of each stage. Checkpoints are complete, each rank writes its stage, and they continue with
    any strategy or one process.

    Together with: `accumulate` runs the schedule once per micro-batch of the window. `clip` takes the norm over all
    stages. `amp` in bf16, `ema`, `remat`, `schedule` and `guard` work. `tensor_parallel` divides the layers of stages
    among neighbouring ranks. Refused: `compile`, `cuda_graph`, `sam`, loss scalers, several optimizers, optimizers with
    a closure, BatchNorm, a model's own activation checkpointing, and other strategies. In validation one stage computes
    at a time. Metrics of torchmetrics are those of the last stage; what else a step collects is on its rank alone.

    ::

        forge fit quickstart --nproc 2 -p pipeline trainer.max_epochs=1
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        microbatches: int = 4
        "Equal parts that each micro-batch is cut into; at least as many as stages keep all ranks busy."
        schedule: Schedule = "1f1b"
        "Order of forward and backward passes; the interleaved one has two stages per rank."
        stages: int | None = None
        "Ranks of one pipeline; null: `pipe` of trainer.mesh, else all."
        split: list[str] = field(default_factory=list)
        "Names of the blocks that begin a stage, without the first; empty: evenly by parameters."
        shard: bool = False
        "Divide weights, gradients and optimizer state of each stage among the pipelines; also by trainer.mesh's shard."
        backend: str | None = None
        "Communication backend: nccl, gloo, ...; null: chosen by device."
        watchdog: float = 120.0
        "Seconds without progress after which a run counts as stalled: it reports which rank waits, and ends."

    config: Config
    provides = ("strategy", "pipeline")
    axes = {"data": "samples", "shard": "samples weights", "pipe": "blocks", "*": "matrices"}
    conflicts = {
        "grad_scaler": "Use amp.dtype=bf16, which needs none.",
        "second_pass": "Use ddp or fsdp with sam.",
        "compiled_code": "Remove compile: a stage leaves the step in the middle.",
    }

    def __init__(self, *first: int, **values: Any):
        super().__init__(*first, **values)
        config = self.config
        for name, least in (("microbatches", 1), ("stages", 2)):
            value = getattr(config, name)
            if value is not None and value < least:
                raise RecipeError(f"pipeline.{name} is {value}; it must be at least {least}.")
        check_positive(self, "watchdog")
        self._begin()

    def _begin(self) -> None:
        self._env: StagedEnv | None = None
        self._calls: BlockCalls | None = None
        self._cutting: Cutting | None = None
        self._shards: Shards | None = None
        self._is_whole = False
        "Whether sharded parameters are gathered now."
        self._outside: list[Place] = []
        "The parameters outside of blocks."
        self._blocks: list[nn.Module] = []
        self._bounds: list[int] = []
        self._ranks: list[int] = []
        "The rank of each stage."
        self._schedules: Schedules | None = None
        self._used: dict[Any, list[nn.Parameter]] = {}
        self._parts: list[Any] = []
        self._scales: list[Any] = []
        self._counts: list[bool] = []
        "Whether each part is one of the batch, rather than a copy that fills the schedule."
        self._metrics = LastMetrics()
        self._step: forge.Step | None = None
        self._use = AgreedUse(self.name, "Use ddp with ddp.find_unused=true, or fsdp, or freeze them.")
        self._seed = 0
        self._failed = False

    # -- build --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        from forge.distributed.rank_info import RankInfo

        several = RankInfo.read().world > 1
        trainer.mesh_axes["shard" if self.config.shard else "data"] = 0
        trainer.mesh_axes[AXIS] = (self.config.stages or 0) if several else 1

    @forge.hookimpl
    def forge_setup_env(self, trainer: forge.Run) -> DistributedEnv:
        self._begin()
        config = self.config
        self._env = StagedEnv(trainer.device, trainer=trainer, backend=config.backend, watchdog=config.watchdog)
        if self._env.world > 1:
            self._env.use(AXIS)
        return self._env

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, build: Build, phase: str) -> None:
        env = self._env
        assert env is not None
        if phase != "parallel" or env.pipe_world == 1:
            return
        task, config = build.task, self.config
        self._ranks = ranks_of(config.schedule, env.pipe_world)
        stages = len(self._ranks)
        if any(tensor.is_meta for tensor in (*task.parameters(), *task.buffers())):
            raise TaskError("pipeline cuts a task that has its weights. Make it on the CPU.")
        if trainer.verb == "fit":
            refuse_sparse(task, self.name)
        shards = config.shard or env.shard_world > 1
        if shards:
            refuse_unshardable(task, "pipeline.shard")
        tell_different_weights(trainer)
        env.copy_from_first(task)
        self._seed = env.broadcast(torch.initial_seed()) if trainer.seed is None else trainer.seed
        blocks = blocks_of(task, config.split)
        self._bounds = bounds_of(blocks, stages, config.split)
        stage_of = [max(s for s in range(stages) if self._bounds[s] <= n) for n in range(len(blocks))]
        names, self._blocks = list(blocks), list(blocks.values())
        inside = {id(p) for block in blocks.values() for p in block.parameters()}
        self._outside = [places[0] for key, (_, places) in places_of(task).items() if key not in inside]
        self._cutting = Cutting(task, blocks, stage_of, self._ranks)
        self._cutting.take_out(env.pipe_rank)
        tensors = (*task.named_parameters(), *task.named_buffers())
        env.last = self._ranks[-1]
        env.elsewhere = {name for name, tensor in tensors if tensor.is_meta}
        if shards:
            self._shard(build, env)
        env.shared = self._live_outside()
        self._calls = calls = BlockCalls(blocks, type(task).__name__, env.device)
        made = config.schedule, config.microbatches, env, calls, self._ranks
        self._schedules = Schedules(*made, run=self.train_part, parameters=self.parameters_of)
        build.model = StagedModel(build.model, self.evaluate)
        shown = [listed(names[a:b], MANY) for a, b in zip(self._bounds, self._bounds[1:], strict=False)]
        logger.info("pipeline: %d stages on %d ranks: %s.", stages, env.pipe_world, "; ".join(shown))

    def _shard(self, build: Build, env: StagedEnv) -> None:
        """Divide the parameters of this rank's stages, and those outside of blocks, among the pipelines."""
        if env.shard_world == 1:
            logger.warning(
                "pipeline.shard: there is one pipeline, so nothing is divided. Start more ranks than stages."
            )
            return
        assert env.mesh is not None
        axes = tuple(axis for axis in env.data_axes if env.mesh[axis].size() > 1)
        options = {"mesh": env.mesh[axes], "reshard_after_forward": False}
        elsewhere = {parameter for parameter in build.task.parameters() if parameter.is_meta}
        self._shards = Shards(build.task)
        for block in self._blocks:
            own = list(block.parameters())
            if own and not any(p.is_meta for p in own) and not is_tied(block, build.task):
                self._shards.add(block, options)
        self._shards.add(build.model, {**options, "ignored_params": elsewhere})
        self._shards.remove_forward_hooks()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Gather sharded parameters inside the `with`."""
        if self._shards is None or self._is_whole:
            yield
            return
        self._gather()
        try:
            yield
        finally:
            self._shards.reshard()
            self._is_whole = False

    def _gather(self) -> None:
        if self._shards is not None and not self._is_whole:
            self._shards.gather()
            self._is_whole = True

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        refuse_different_samples(trainer)
        if trainer.verb != "fit" or trainer.env.world == 1:
            return
        entries = trainer.optimizers.entries
        if trainer.optimizers.named:
            raise StackError("pipeline trains one optimizer; the task returns several by name. Use ddp or fsdp.")
        for entry in entries.values():
            coupled = getattr(entry.optimizer, "max_norm", None) is not None
            if entry.needs_closure or entry.has_modes or coupled:
                kind = type(entry.optimizer).__name__
                raise StackError(f"pipeline: {kind} needs all parameters on one rank. Use another optimizer.")

    # -- a stage ------------------------------------------------------------------------------------------------------

    def run_stage(self, call: Any, stage: int, received: Tensor | None, seed: int) -> Any:
        """Run the task's step in one stage: the output of the stage, or of the whole step in the last one."""
        assert self._calls is not None
        begin, end = self._bounds[stage], self._bounds[stage + 1]
        with self._calls.running(begin, end, received, seed):
            try:
                output = call()
            except StageEnded as ended:
                plain = type(ended.output) is Tensor  # else a sum over ranks that may be under way
                return ended.output.contiguous() if plain else ended.output.clone()  # to be sent
        if stage < len(self._ranks) - 1:
            raise TaskError("pipeline: the step ends before the blocks of the next stage are called.")
        return output

    def parameters_of(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters that a stage may use: those of its blocks, and those outside of all blocks."""
        blocks = self._blocks[self._bounds[stage] : self._bounds[stage + 1]]
        return [*(parameter for block in blocks for parameter in block.parameters()), *self._live_outside()]

    def _live_outside(self) -> list[nn.Parameter]:
        """Return the parameters outside of blocks: shards, or whole while they are gathered."""
        return [parameter for owner, name in self._outside if (parameter := owner[name]) is not None]

    def train_part(self, stage: int, part: int, received: Tensor | None) -> Tensor:
        """Run one part of a micro-batch in one stage, in training."""
        step = self._step
        assert step is not None
        forward = step.trainer.hooks.forge_forward
        seed = combine_seeds(self._seed, step.trainer.env.data_rank, step.index, step.micro, part)
        with nullcontext() if self._counts[part] else restored_after(step.trainer.task):
            output = self.run_stage(lambda: forward(step, self._parts[part]), stage, received, seed)
        if stage < len(self._ranks) - 1:
            return output
        metrics = {"loss": output} if isinstance(output, Tensor) else output
        if not isinstance(metrics, dict) or "loss" not in metrics:
            raise TaskError("pipeline: training_step must return the loss, or a dict with it.")
        named = with_names(metrics, step.trainer.task)
        self._metrics.parts[part] = {k: v.detach() if isinstance(v, Tensor) else v for k, v in named.items()}
        return weigh_loss(metrics["loss"], self._scales[part])

    # -- a micro-batch ------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_micro_step(self, step: forge.Step, batch: Any) -> bool | None:
        env, schedules = self._env, self._schedules
        assert env is not None
        if schedules is None:
            return None
        self._gather()
        trainer, most = step.trainer, self.config.microbatches
        parts = cut_batch(batch, most)
        weights = self._weights(trainer, parts)
        whole = 1.0 / step.divisor if step.factors is None else step.factors[step.micro]
        spare = most - len(parts)
        self._step, self._parts = step, [*parts, *[parts[-1]] * spare]
        self._scales = [weight * whole for weight in weights] + [0.0] * spare
        self._counts = [True] * len(parts) + [False] * spare
        self._metrics.parts = [{} for _ in self._parts]
        schedule = schedules.of(trainer, self._parts, self._scales)
        numbers = torch.arange(most)
        is_first = self._ranks[0] == env.pipe_rank
        is_last = env.last == env.pipe_rank
        try:
            schedule.step(
                *([numbers.to(env.device)] if is_first else []),
                part=numbers,
                target=numbers if is_last else None,
                return_outputs=False,
            )
        except RuntimeError as error:
            if isinstance(error.__cause__, ForgeError):  # torch wraps what a stage raises
                raise error.__cause__ from None
            raise
        self._metrics.record(env, step, weights)
        self._step, self._parts = None, []
        return True

    def _weights(self, trainer: forge.Run, parts: list[Any]) -> list[Any]:
        if not trainer.task_defines_num_items:
            return [1 / len(parts)] * len(parts)
        items = [trainer.task.num_items(part) for part in parts]
        total = exact(sum(items))
        return [count / (total + (total == 0)) for count in items]  # a pipeline may have no items

    # -- gradients ----------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_finalize_grads(self, step: forge.Step) -> None:
        env = self._env
        assert env is not None
        if env.pipe_world == 1:
            return
        self._check_use(step, env)
        settle_gradients(step.trainer.task.parameters())
        if self._shards is not None:
            self._shards.reduce()
            self._is_whole = False
        sum_gradients(self._shared_used(step, env), env.pipe_group)
        self._metrics.arrive(step)
        if env.data_world > 1:
            averaged = self._shards is not None
            trained = [p for p in step.parameters() if p.grad is not None and not (averaged and p.ndim)]
            sum_gradients(trained, env.data_group, 1 / env.data_world)

    def _check_use(self, step: forge.Step, env: StagedEnv) -> None:
        """Refuse gradients that some pipelines have and others do not: they would be added to those of others."""
        if env.data_world == 1:
            return
        named = [(n, p) for n, p in step.trainer.task.named_parameters() if not p.is_meta]
        used = {id(parameter) for _, parameter in named if parameter.grad is not None}

        def gather(own: list[bool]) -> list[Any]:
            return [mask for rank, mask in env.gather((env.pipe_rank, own)) if rank == env.pipe_rank]

        self._use.check(named, used, gather)

    def _shared_used(self, step: forge.Step, env: StagedEnv) -> list[nn.Parameter]:
        """Return the parameters outside of blocks that any rank has a gradient of; agreed when the trained ones
        change."""
        key = tuple(parameter.requires_grad for parameter in env.shared)
        if key not in self._used:
            masks: list[Any] = [None] * env.pipe_world
            dist.all_gather_object(masks, [p.grad is not None for p in env.shared], group=env.pipe_control)
            self._used[key] = [p for p, *used in zip(env.shared, *masks, strict=True) if any(used)]
        used = {id(parameter) for parameter in self._used[key]}
        if any(p.grad is not None and id(p) not in used for p in env.shared):
            raise TaskError("pipeline: a parameter outside of blocks is used in some updates only. Freeze it.")
        return self._used[key]

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, call: Any, trainer: forge.Run) -> Any:
        """Run a whole batch through one stage after the other; all ranks get the output."""
        env, calls = self._env, self._calls
        assert env is not None
        assert calls is not None
        calls.forms = {}
        seed = combine_seeds(self._seed, env.data_rank, trainer.progress.update, trainer.evaluated)
        carried: Any = None
        drawn = RNGState.capture(env.device)
        with self._whole():
            for stage, (rank, following) in enumerate(zip(self._ranks, [*self._ranks[1:], env.last], strict=True)):
                if rank == env.pipe_rank:
                    carried = self.run_stage(call, stage, carried, seed)
                if following != rank:
                    carried = self._pass_on(carried, rank, following, env, calls)
        drawn.restore(env.device)  # stages are seeded
        return with_metrics(env.from_last(with_names(carried, trainer.task)), trainer.task)

    def _pass_on(self, tensor: Tensor, source: int, target: int, env: StagedEnv, calls: BlockCalls) -> Any:
        if env.pipe_rank == source:
            about = [tuple(tensor.shape), tensor.dtype, calls.forms]
            dist.send_object_list(about, group=env.pipe_control, group_dst=target)
            dist.send(tensor.detach(), group=env.pipe_group, group_dst=target)
        elif env.pipe_rank == target:
            shape: Any = [None, None, None]
            dist.recv_object_list(shape, group=env.pipe_control, group_src=source)
            calls.forms.update(shape[2])
            tensor = torch.empty(shape[0], dtype=shape[1], device=env.device)
            dist.recv(tensor, group=env.pipe_group, group_src=source)
        return tensor

    # -- the end ------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_export(self, trainer: forge.Run, path: Path) -> bool | None:
        env, cutting = self._env, self._cutting
        if env is None or cutting is None:
            return None
        whole = cutting.whole(env.pipe_group, env.device)
        held = [(place, name, place[name]) for place, name, _ in whole]
        for place, name, values in whole:
            place[name] = nn.Parameter(values) if isinstance(place[name], nn.Parameter) else values
        try:
            return trainer.core.forge_export(trainer, path)
        finally:
            for place, name, own in held:
                place[name] = own

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._failed = True

    @forge.hookimpl
    def forge_end(self) -> None:
        env, calls, cutting, failed = self._env, self._calls, self._cutting, self._failed
        shards = self._shards
        self._begin()
        if env is None:
            return
        try:
            if calls is not None:
                calls.remove()
            if shards is not None:
                shards.remove(gather=not failed)
            if cutting is not None and not failed:
                cutting.put_back(env.pipe_group, env.device)
        finally:
            env.close(failed)
