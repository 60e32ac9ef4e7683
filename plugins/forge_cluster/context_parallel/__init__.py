"""Context parallelism."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

import forge
from forge.contract.task import Build, defines
from forge.errors import ForgeError, RecipeError, StackError, TaskError
from forge.optim.sharded import is_distributed
from forge.snapshot.sandbox import uncompiled, without_side_effects
from forge.twin.compare import Difference
from forge_cluster.context_parallel.calls import SequenceCalls, WithoutDropout
from forge_cluster.context_parallel.comparison import Outcome, compared_length, difference, mean_over, outcome_of
from forge_cluster.context_parallel.ring import Ring
from forge_cluster.context_parallel.slices import Slicing

logger = logging.getLogger("forge")

AXIS = "context"


class ContextParallel(forge.Plugin):
    """Divide every sequence among ranks: for sequences whose activations do not fit on one device.

    Each rank has a slice of every sequence of the batch. Attention goes over the slices of all ranks, by torch's ring
    attention: keys and values pass from rank to rank, slice by slice. All else is computed position by position, so
    activations take 1/n of the memory. With more ranks than `size`, groups of `size` neighbours divide batches.

    The strategy beside it averages gradients over slices too: `ddp`; `zero`; or `fsdp`, which then divides the weights
    among the ranks of a sequence as well.

    The model calls `torch.nn.functional.scaled_dot_product_attention`, causal or full, without a mask and without
    dropout of attention weights. What knows positions needs those of the slice: write `forge.positions(x)` in place of
    `torch.arange(x.shape[1])`, or pass it to models that take them, as `position_ids=forge.positions(tokens)[None]` for
    those of transformers. For a model that cannot be changed, `positions=arange` lets every `torch.arange` that is as
    long as the slice return its positions. Targets are shifted in the data set, not in the step: the next token of a
    slice's last position is on another rank.

    The first batch of each stage is computed twice, divided and whole (up to 512 positions, or as many as a rank has),
    and metrics and gradients are compared. A model that mixes positions elsewhere (a convolution or a mean over the
    sequence, positions of its own, shifted targets) is refused there, with the cure. `check=false` leaves it out: for a
    step that draws random numbers other than dropout.

    Tokens are found: the first tensor of integers with a dimension `dim` (1), and all tensors as long along it. Name
    others in `entries`. The mean of `cross_entropy` is taken over the targets that count on all ranks. Other losses are
    means over positions, or over what the task's `num_items` counts.

    When to use it: for long sequences in small batches, where attention takes much of the time. `balance` gives each
    rank a slice of the head and one of the tail, so that all have as much causal attention to compute.

    What you see: positions per rank. Checkpoints are those of the strategy, and continue with any other or one process.

    Together with: `accumulate`, `clip`, `amp`, `ema`, `remat`, `guard` and `schedule` work as with `ddp`. With `fsdp`
    also `tensor_parallel`, which divides the heads. `compile` leaves compiled code at each attention. Every rank draws
    its own dropout. `predict` computes whole sequences on every rank. Refused: `kernels`, `cuda_graph` and `pipeline`.

    ::

        forge fit shakespeare_char_cpu --nproc 2 -p ddp -p context_parallel trainer.max_updates=50
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        size: int | None = None
        "Ranks that divide a sequence; null: `context` of trainer.mesh, else all. The others divide batches."
        balance: bool = True
        "Give each rank a slice of the head and one of the tail: equal work for causal attention."
        entries: list[str] = field(default_factory=list)
        "Entries of the batch that hold sequences, by key or number (inputs, 0, text.tokens); empty: found."
        dim: int = 1
        "Dimension of these entries that holds the positions."
        positions: Literal["task", "arange"] = "task"
        "Who knows positions: the task, by forge.positions, or every torch.arange as long as the slice."
        check: bool = True
        "Compare the first batch of each stage with whole sequences."

    config: Config
    provides = ("context_parallel",)
    axes = {"context": "positions"}
    before = ("strategy",)
    conflicts = {
        "kernels": "Remove kernels: it replaces the attention that context_parallel divides.",
        "step_capture": "Remove cuda_graph: the ring waits for other ranks in every attention.",
    }

    def __init__(self, *first: int | None, **values: Any):
        super().__init__(*first, **values)
        config = self.config
        if config.size is not None and config.size < 2:
            raise RecipeError(f"context_parallel.size is {config.size}; it must be at least 2, or null for all ranks.")
        if config.dim < 0:
            raise RecipeError(f"context_parallel.dim is {config.dim}; it must be at least 0.")
        self._begin()

    def _begin(self) -> None:
        self._group: Any = None
        self._compares: Callable[[Any], Any] | None = None
        "What the model computes in place of a slice: while it is compared."
        self._calls: SequenceCalls | None = None
        self._slicing: Slicing | None = None
        self._sliced: SlicedModel | None = None
        self._checked: set[Any] = set()
        self._in_step = self._warned = False

    # -- build --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        from forge.distributed.rank_info import RankInfo

        self._begin()
        trainer.mesh_axes[AXIS] = (self.config.size or 0) if RankInfo.read().world > 1 else 1

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, build: Build, phase: str) -> None:
        mesh, config = trainer.env.mesh, self.config
        if phase != "parallel" or mesh is None or mesh[AXIS].size() == 1:
            return
        compiled = any("compiled_code" in plugin.provides for plugin in trainer.stack)
        if compiled and config.positions == "arange":
            raise StackError(
                "context_parallel.positions=arange does not reach compiled code. Use forge.positions in the task, "
                "or remove compile."
            )
        self._group = mesh[AXIS].get_group()
        size = mesh[AXIS].size()
        ring = Ring(self._group, config.balance)
        self._slicing = Slicing(tuple(config.entries), config.dim, mesh.get_local_rank(AXIS), size, config.balance)
        self._calls = SequenceCalls(ring, defines(build.task, "num_items"), config.positions == "arange")
        self._calls.install(compiled)
        build.model = self._sliced = SlicedModel(build.model, self)

    # -- a step -------------------------------------------------------------------------------------------------------

    @forge.hookimpl(wrapper=True)
    def forge_micro_step(self, step: forge.Step, batch: Any) -> Generator[None, Any, Any]:
        calls, sliced = self._calls, self._sliced
        if calls is None or sliced is None:
            return (yield)
        self._check(step.trainer, sliced.inner, batch, step.stage, step.name)
        self._in_step = True  # until the backward pass has ended: activation checkpointing computes slices there
        try:
            return (yield)
        finally:
            self._in_step = False
            calls.enter(None)

    def run(self, inner: nn.Module, batch: Any, stage: str, name: str | None) -> Any:
        """Compute this rank's slice of a batch."""
        task: Any = inner.task
        if self._compares is not None:
            return self._compares(batch)
        if stage != "train":
            self._check(task.trainer, inner, batch, stage, name)
        if stage == "predict":
            return inner(batch, stage, name)
        calls, slicing = self._calls, self._slicing
        assert calls is not None
        assert slicing is not None
        before = calls.own
        try:
            with calls.seen():
                return self._slice(task, inner, batch, stage, name, slicing.length(batch))
        finally:
            if stage != "train" or not self._in_step:
                calls.enter(before)

    def _slice(self, task: Any, inner: nn.Module, batch: Any, stage: str, name: str | None, length: int) -> Any:
        """Return the output on this rank's slice, weighed: its mean over the ranks is that of whole sequences."""
        calls, slicing = self._calls, self._slicing
        assert calls is not None
        assert slicing is not None
        part, losses = slicing.cut(batch, length), calls.losses
        calls.enter(slicing.positions(length, task.trainer.env.device))
        output = inner(part, stage, name)
        if calls.counts_items:
            return _weighed(output, task.num_items(part), task.num_items(batch), slicing.size)
        if stage == "train" and calls.losses == losses and not self._warned:
            self._warned = True
            logger.warning(
                "context_parallel: the loss is not torch's cross_entropy, so it counts as a mean over all positions. "
                "If some do not count, define num_items on the task."
            )
        return output

    # -- the comparison -----------------------------------------------------------------------------------------------

    def _check(self, trainer: forge.Run, inner: nn.Module, batch: Any, stage: str, name: str | None) -> None:
        """Compare the first batch of a stage with whole sequences."""
        slicing, calls = self._slicing, self._calls
        assert slicing is not None
        assert calls is not None
        if not self.config.check or stage == "predict":
            return
        length = slicing.length(batch)
        key = (stage, name, length) if self.config.positions == "arange" else (stage, name)
        if key in self._checked:
            return
        if not self._checked and trainer.env.is_main:
            logger.info("context_parallel: each rank has %d of %d positions.", length // slicing.size, length)
        self._checked.add(key)
        task, before, slice_before = trainer.task, calls.attentions, calls.own
        trained = {n: p for n, p in task.named_parameters() if p.requires_grad} if stage == "train" else {}
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        kind = trainer.env.device.type
        try:
            with without_side_effects(trainer), uncompiled(), torch.autocast(kind, enabled=False), WithoutDropout():
                shorter = compared_length(length, slicing.size, slicing.multiple)
                batch, length, expected = self._whole(inner, batch, stage, name, length, shorter, trained)
                own = self._divided(task, inner, batch, stage, name, length, trained)
        finally:
            torch.set_float32_matmul_precision(precision)
            calls.enter(slice_before)
        if calls.attentions == before:
            raise TaskError(
                f"context_parallel: {type(task).__name__} does not call torch.nn.functional."
                "scaled_dot_product_attention in this stage, so its positions do not see those of other ranks. Use it "
                "for attention, or another strategy (ddp, fsdp)."
            )
        dtype = min(
            (p.dtype for p in task.parameters()), key=lambda each: torch.finfo(each).bits, default=torch.float32
        )
        found = difference(own, expected, dtype)
        if trainer.env.all_max([found is not None])[0]:
            raise TaskError(_different(type(task).__name__, stage, found))

    def _whole(
        self,
        inner: nn.Module,
        batch: Any,
        stage: str,
        name: str | None,
        length: int,
        shorter: int,
        parameters: Mapping[str, nn.Parameter],
    ) -> tuple[Any, int, Outcome]:
        """Return a batch, its length, and what one process computes for it; short if the model takes that."""
        assert self._slicing is not None
        short = self._slicing.shortened(batch, length, shorter)

        def outcome(batch: Any) -> Outcome:
            return outcome_of(lambda: self._called(lambda batch: inner(batch, stage, name), batch, stage), parameters)

        try:
            return short, shorter, outcome(short)
        except Exception:
            if shorter == length or any(
                map(is_distributed, parameters.values())
            ):  # a strategy is in the middle of its step
                raise
        return batch, length, outcome(batch)

    def _called(self, compute: Callable[[Any], Any], batch: Any, stage: str) -> Any:
        """Compute in the place of a slice, so that a strategy around it gathers weights and averages gradients."""
        sliced = self._sliced
        if stage != "train" or sliced is None:
            return compute(batch)  # this is within the model's forward
        self._compares = compute
        try:
            return sliced(batch, stage)
        finally:
            self._compares = None

    def _divided(
        self,
        task: Any,
        inner: nn.Module,
        batch: Any,
        stage: str,
        name: str | None,
        length: int,
        parameters: Mapping[str, nn.Parameter],
    ) -> Outcome:
        calls, slicing = self._calls, self._slicing
        assert calls is not None
        assert slicing is not None

        def compute(batch: Any) -> Any:
            return self._slice(task, inner, batch, stage, name, length)

        try:
            with calls.seen():
                own = outcome_of(lambda: self._called(compute, batch, stage), parameters)
        except ForgeError:
            raise
        except Exception as error:
            raise TaskError(
                f"context_parallel: {type(task).__name__} computes whole sequences, but fails on a slice of "
                f"{length // slicing.size} of {length} positions: {type(error).__name__}: {error} Entries of the "
                "batch that hold sequences are named in context_parallel.entries; positions are forge.positions(x)."
            ) from error
        return mean_over(self._group, own, parameters)

    # -- the end ------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_end(self) -> None:
        if self._calls is not None:
            self._calls.remove()
        self._begin()


class SlicedModel(nn.Module):
    """What the Trainer calls, or DDP: the task's step on this rank's slice."""

    def __init__(self, inner: nn.Module, plugin: ContextParallel):
        super().__init__()
        self.inner = inner
        self._plugin = [plugin]

    def forward(self, batch: Any, stage: str, name: str | None = None) -> Any:
        return self._plugin[0].run(self.inner, batch, stage, name)


def _weighed(output: Any, items: int | Tensor, total: int | Tensor, size: int) -> Any:
    """Return the output's numbers times what the slice counts, in parts of an average slice."""
    if not isinstance(items, Tensor) and items * size == total:
        return output
    if isinstance(output, Mapping):
        return {name: _times(value, items * size, total) for name, value in output.items()}
    return _times(output, items * size, total)


def _times(value: Any, items: int | Tensor, total: int | Tensor) -> Any:
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0):
        most = total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1)
        return value * items / most  # in the value's precision
    return value


def _different(task: str, stage: str, found: Difference | None) -> str:
    return (
        f"context_parallel: {task} does not compute the same on divided sequences as on whole ones ({stage}: "
        f"{found or 'on another rank'}). Something besides attention knows other positions. Use forge.positions(x) in "
        "place of torch.arange(length), or context_parallel.positions=arange for a model that cannot be changed. Shift "
        "targets in the data set, not in the step. Define num_items if some targets do not count. Convolutions, means "
        "over the sequence and batch statistics cannot be divided. If the step draws random numbers, compare by "
        "yourself and set context_parallel.check=false."
    )
