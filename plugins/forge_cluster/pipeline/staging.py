"""Stages as torch's schedules and the Trainer call them, and the processes that hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import forge
from forge.distributed import DistributedEnv
from forge.metrics.torchmetrics import is_metric


class Stage(PipelineStage):
    """torch's stage. torch 2.10 greets the neighbours of a stage first; gloo cannot greet its own rank."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        greetings: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()  # pyright: ignore[reportAttributeAccessIssue]
        return [greeting for greeting in greetings if greeting.group_peer != self.group_rank]


class StagePart(nn.Module):
    """One stage, as torch's schedules call it."""

    def __init__(self, stage: int, train: Callable[[int, int, Tensor | None], Tensor], own: list[nn.Parameter]):
        super().__init__()
        self._run, self._stage, self._own = train, stage, own

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those that a schedule computes gradients of apart from those of inputs."""
        return (parameter for parameter in self._own if parameter.requires_grad)

    def forward(self, received: Tensor, *, part: Tensor) -> Tensor:
        return self._run(self._stage, int(part), received if self._stage else None)


class StagedModel(nn.Module):
    """What the Trainer calls: in training the current stage, else all stages in turn."""

    def __init__(self, inner: nn.Module, evaluate: Callable[[Any, forge.Run], Any]):
        super().__init__()
        self.inner, self._evaluate = inner, evaluate

    def forward(self, batch: Any, stage: str, name: str | None = None) -> Any:
        if stage == "train":
            return self.inner(batch, stage, name)
        task: Any = self.inner.task
        return self._evaluate(lambda: self.inner(batch, stage, name), task.trainer)


class StagedEnv(DistributedEnv):
    """Several processes in pipelines; each holds the tensors of its stages."""

    inference_mode = False
    elsewhere: Set[str] = frozenset()
    "The task's tensors that other ranks hold."
    pipe_rank, pipe_world = 0, 1
    pipe_group: Any = None
    pipe_control: Any = None
    "The ranks of this pipeline, for tensors and for forge's own messages."
    data_group: Any = None
    shard_world = 1
    "Ranks that divide the weights of a stage."
    last = 0
    "The rank of this pipeline with the last stage, which alone runs steps to their end."

    def use(self, axis: str) -> None:
        assert self.mesh is not None
        self.pipe_group, self.data_group = self.mesh[axis].get_group(), self.along(self.data_axes).get_group()
        self.pipe_rank, self.pipe_world = dist.get_rank(self.pipe_group), dist.get_world_size(self.pipe_group)
        self.shard_world = math.prod(self.mesh[name].size() for name in self.axes_of("weights"))
        names = self.mesh.mesh_dim_names or ()
        lines = self.mesh.mesh.movedim(names.index(axis), -1).reshape(-1, self.pipe_world).tolist()
        self.pipe_control, _ = dist.new_subgroups_by_enumeration(lines, backend="gloo")
        self.parts, self.is_divided = self.pipe_group, True

    def from_last(self, value: Any) -> Any:
        """Return the value of the rank with the last stage."""
        sent = [value]
        dist.broadcast_object_list(sent, group=self.pipe_control, group_src=self.last)
        return value if self.pipe_rank == self.last else sent[0]

    def holds(self, path: tuple[str | int, ...]) -> bool:
        return self.elsewhere.isdisjoint(map(str, path))

    def copy_from_first(self, module: nn.Module, parameters: bool = True) -> None:
        if not self.elsewhere:
            super().copy_from_first(module, parameters)
        elif self.data_world > 1:
            for buffer in module.buffers():
                if not buffer.is_meta:
                    dist.broadcast(buffer, group=self.data_group, group_src=0)


@dataclass(frozen=True, slots=True)
class MetricName:
    """A task's torchmetrics object, in a message to other ranks."""

    path: str


def with_names(output: Any, task: nn.Module) -> Any:
    """Return what a step returned with torchmetrics objects by name: other ranks have objects of their own."""
    if not isinstance(output, Mapping) or not any(map(is_metric, output.values())):
        return output
    paths = {id(module): path for path, module in task.named_modules(remove_duplicate=False)}
    return {key: MetricName(paths[id(value)]) if id(value) in paths else value for key, value in output.items()}


def with_metrics(output: Any, task: nn.Module) -> Any:
    """Return what a step returned with this rank's torchmetrics objects in place of their names."""
    if not isinstance(output, dict) or not any(isinstance(value, MetricName) for value in output.values()):
        return output
    return {k: task.get_submodule(v.path) if isinstance(v, MetricName) else v for k, v in output.items()}
