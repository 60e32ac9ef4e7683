"""Schedules: torch's orders of forward and backward passes, made for a task's stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

import forge
from forge.distributed.divided_norms import dividing_norms
from forge.errors import RecipeError, TaskError
from forge.snapshot.sandbox import without_side_effects
from forge.util.patterns import listed
from forge_cluster.pipeline.microbatches import shapes_of
from forge_cluster.pipeline.running import BlockCalls
from forge_cluster.pipeline.staging import Stage, StagedEnv, StagePart

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b"]
SCHEDULES: dict[str, tuple[str, int]] = {
    "gpipe": ("GPipe", 1),
    "1f1b": ("1F1B", 1),
    "interleaved_1f1b": ("Interleaved1F1B", 2),
}
"""torch's name of a schedule, and its stages per rank."""


def ranks_of(schedule: str, ranks: int) -> list[int]:
    """Return the rank of each stage in a pipeline of so many ranks."""
    return list(range(ranks)) * SCHEDULES[schedule][1]


@dataclass(slots=True)
class Schedules:
    """torch's schedules of a task's stages, one for all parts of the same shapes."""

    name: str
    parts: int
    "Equal parts that each micro-batch is cut into."
    env: StagedEnv
    calls: BlockCalls
    ranks: list[int]
    "The rank of each stage."
    run: Callable[[int, int, Tensor | None], Tensor]
    "Runs a stage on a part of the micro-batch."
    parameters: Callable[[int], list[nn.Parameter]]
    "Those that a stage may use."
    _made: dict[Any, tuple[Any, dict[int, Any]]] = field(default_factory=dict)
    "A schedule, and what blocks return, by the shapes of a part."

    def of(self, trainer: forge.Run, batches: Sequence[Any], scales: Sequence[Any]) -> Any:
        """Return torch's schedule for parts of these shapes."""
        key, env = shapes_of(batches[0]), self.env
        if key not in self._made:
            self.calls.forms = {}
            _refuse_batch_norm(trainer.task)
            sent = self._boundaries(trainer, scales)
            own = [
                Stage(
                    StagePart(stage, self.run, self.parameters(stage)),
                    stage,
                    len(self.ranks),
                    env.device,
                    input_args=(sent[stage],),
                    output_args=(sent[stage + 1],),
                    group=env.pipe_group,
                )
                for stage, rank in enumerate(self.ranks)
                if rank == env.pipe_rank
            ]
            self._made[key] = self._make(own), self.calls.forms
        made, self.calls.forms = self._made[key]
        return made

    def _make(self, own: list[Stage]) -> Any:
        kind: Any = get_schedule_class(SCHEDULES[self.name][0])
        stages: Any = own[0] if issubclass(kind, PipelineScheduleSingle) else own
        try:
            return kind(stages, self.parts, loss_fn=lambda loss, target: loss, scale_grads=False)
        except ValueError as error:
            raise RecipeError(
                f"pipeline.microbatches is {self.parts}, which pipeline.schedule={self.name} does not take with "
                f"{len(self.ranks)} stages: {error} Use a multiple of {len(self.ranks)}."
            ) from error

    def _boundaries(self, trainer: forge.Run, scales: Sequence[Any]) -> list[Tensor]:
        """Return tensors of the shapes that stages get and pass on; one forward of the part with most items finds them,
        and what blocks return."""
        env = self.env
        part = max(range(len(scales)), key=lambda number: float(scales[number]))
        found: list[Any] = [((1,), torch.int64, False)]
        with without_side_effects(trainer), torch.enable_grad():
            for stage, rank in enumerate(self.ranks):
                sent: Any = [None]
                if rank == env.pipe_rank:
                    shape, dtype, _ = found[-1]
                    received = None
                    if stage:
                        received = torch.randn(shape, dtype=dtype, device=env.device).requires_grad_()
                    try:
                        output = self.run(stage, part, received)
                        self._refuse_leak(output, stage, has_items=float(scales[part]) != 0)
                        sent = [((tuple(output.shape), output.dtype, True), self.calls.forms)]
                    except TaskError as error:
                        sent = [error]
                dist.broadcast_object_list(sent, group=env.pipe_control, group_src=rank)
                if isinstance(sent[0], TaskError):
                    raise sent[0]  # on all ranks
                boundary, forms = sent[0]
                found.append(boundary)
                self.calls.forms.update(forms)
        return [torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad) for shape, dtype, grad in found]

    def _refuse_leak(self, output: Tensor, stage: int, has_items: bool) -> None:
        is_mean_of_none = stage == len(self.ranks) - 1 and not has_items
        if stage and not is_mean_of_none and bool(output.isnan().any()):
            raise TaskError(
                f"pipeline: the output of stage {stage} is NaN for a finite input. If it is not in one process, "
                "the output of an early block is used by more than the next block, as a skip connection does, or a "
                "bias that the first block computes for all: such a model cannot be cut there. Use fsdp."
            )


def _refuse_batch_norm(task: nn.Module) -> None:
    if names := dividing_norms(task):
        raise TaskError(
            f"pipeline computes a batch in parts, and BatchNorm ({listed(names)}) would take statistics of each "
            "part, in several stages. Use GroupNorm, or ddp or fsdp, which take them of the samples of one rank."
        )
