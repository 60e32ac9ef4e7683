"""DistributedEnv: the environment of one of many processes, by torch.distributed; made in `forge_setup_env`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from forge.contract.axes import PARTS, kinds, shape_of
from forge.distributed.heartbeat import Heartbeat
from forge.distributed.join import abandon, join
from forge.distributed.rank_info import RankInfo
from forge.env import Env, T, pick_device
from forge.torch_internals import broadcast_coalesced
from forge.util.frozen import frozen_in
from forge.util.signal_waits import signals_act_at_once

if TYPE_CHECKING:
    from forge.contract.run import Run


class DistributedEnv(Env):
    """One of many processes, in a mesh of the axes that plugins ask for (`trainer.mesh_axes`, or `axes`).

    Gradients travel over the default process group: NCCL between GPUs, gloo between CPUs, or `backend`. Forge's own
    messages travel over a second group between hosts, `control`, so that they never wait for a device.
    """

    def __init__(
        self,
        device: str = "auto",
        *,
        trainer: Run | None = None,
        watchdog: float = 120.0,
        backend: str | None = None,
        axes: Mapping[str, int] | None = None,
        info: RankInfo | None = None,
    ):
        self.info = info or RankInfo.read()
        super().__init__(_own_device(device, self.info))
        self.rank, self.world, self.local_rank = self.info.rank, self.info.world, self.info.local_rank
        with signals_act_at_once():
            self.membership = join(self.info, self.device, backend)
            if self.world == 1:  # the user's own script may have initialised the processes
                self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self.store, self.control = self.membership.store, self.membership.control
            self._divided = kinds(() if trainer is None else trainer.stack)
            given, asked = ({}, {}) if trainer is None else (trainer.mesh, trainer.mesh_axes)
            shape = shape_of(given, {**asked, **(axes or {})}, self._divided, self.world)
            self.mesh = self.membership.mesh(self.device.type, shape)
        self.data_rank, self.data_world = self._place({"samples"})
        self.divides_samples = self._place({"positions"})[1] > 1
        alone = self.world == 1
        self.heartbeat = None if alone else Heartbeat(self.store, self.rank, self.world, trainer, watchdog).start()

    def axes_of(self, *divided: str) -> tuple[str, ...]:
        """Return the mesh's axes along which ranks divide any of these: samples, weights, positions, blocks, ..."""
        assert self.mesh is not None
        return tuple(a for a in self.mesh.mesh_dim_names or () if self._divided.get(a, frozenset()) & {*divided})

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh dimensions along which batches are divided."""
        return self.axes_of("samples")

    @property
    def mean_axes(self) -> tuple[str, ...]:
        """The mesh dimensions along which each rank has the gradient of a part: it is averaged over them."""
        return self.axes_of(*PARTS)

    @property
    def mean_rank(self) -> int:
        return self._place(PARTS)[0]

    @property
    def mean_world(self) -> int:
        """How many ranks have the gradient of a part of the batch each."""
        return self._place(PARTS)[1]

    def along(self, names: Sequence[str]) -> DeviceMesh:
        """Return the mesh along some of its axes, in one dimension."""
        assert self.mesh is not None
        names = [name for name in names if self.mesh[name].size() > 1] or [*names][:1]
        return self.mesh[names[0]] if len(names) == 1 else self.mesh[tuple(names)]._flatten()

    def _place(self, divided: Collection[str]) -> tuple[int, int]:
        """Return this rank's number among those that divide any of these, and how many there are."""
        number, count = 0, 1
        for name in self.axes_of(*divided):
            assert self.mesh is not None
            size = self.mesh[name].size()
            number, count = number * size + self.mesh.get_local_rank(name), count * size
        return number, count

    @property
    def seed_rank(self) -> int:
        """Ranks that share matrices draw alike, all others on their own."""
        return self.data_rank + self.data_world * self._place({"blocks", "positions", "experts"})[0]

    def sum(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        if self.world > 1:
            dist.all_reduce(total)
        return total

    def gather(self, value: Any) -> list[Any]:
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast(self, value: Any) -> Any:
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def from_first(self, make: Callable[[], T]) -> T:
        return self.broadcast(make() if self.is_main else None)

    def all_max(self, numbers: Sequence[int]) -> list[int]:
        if self.world == 1:
            return list(numbers)
        together = torch.tensor(list(numbers), dtype=torch.int64)
        dist.all_reduce(together, dist.ReduceOp.MAX, group=self.control)
        return together.tolist()

    def copy_from_first(self, module: nn.Module, parameters: bool = True) -> None:
        parts = [module, *(held.module for held in frozen_in(module).values())]
        held = [tensor for part in parts for tensor in (*(part.parameters() if parameters else ()), *part.buffers())]
        plain = [tensor.detach() for tensor in held if type(tensor) in (Tensor, nn.Parameter)]
        if self.world > 1 and plain:
            self.copy_from(0, plain)

    def copy_from(self, rank: int, tensors: list[Tensor]) -> None:
        """Copy one rank's tensors to every rank, in place, in a few messages."""
        broadcast_coalesced(dist.group.WORLD, tensors, 250 * 2**20, rank)

    def no_timeout(self) -> AbstractContextManager[None]:
        return nullcontext() if self.heartbeat is None else self.heartbeat.no_timeout()

    def close(self, failed: bool) -> None:
        """End a run. The processes stay joined for the next one, unless the run failed: then other ranks may not
        answer."""
        heartbeat = self.heartbeat
        if failed and not (heartbeat is not None and heartbeat.agreed):
            abandon()  # the heartbeat goes on until the session is over: a plugin may wait for a lost rank
        elif heartbeat is not None:
            with heartbeat.no_timeout():
                self.all_max([0])  # no rank leaves, and counts as lost, while another still saves
            heartbeat.stop(left=True)
            self.heartbeat = None

    def __repr__(self) -> str:
        return f"DistributedEnv({self.device}, rank {self.rank} of {self.world})"


def _own_device(device: str, info: RankInfo) -> torch.device:
    """Return the device of this process: the GPU of its local rank, or the given device."""
    picked = pick_device(device)
    bound = info.by_task and torch.cuda.device_count() == 1  # srun --gpus-per-task=1: each task sees its own GPU
    if picked.type == "cuda" and info.world > 1 and device in ("auto", "cuda") and not bound:
        return pick_device(f"cuda:{info.local_rank}")
    return picked
