"""Env: device and ranks of a run; one process on one device here, many in `forge.distributed`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from forge.errors import ForgeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class Env:
    """One process on one device: device, rank, world and reductions, which return their argument.

    A strategy returns a `forge.distributed.DistributedEnv` from `forge_setup_env` instead.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    "The index of this process on its host."
    data_rank: int = 0
    "Which part of every global batch this rank trains on."
    data_world: int = 1
    "How many parts a global batch is divided into: `world`, unless several ranks hold one model together."
    mesh: DeviceMesh | None = None
    "The processes as torch's device mesh."
    store: Store | None = None
    "The key-value store of all processes."
    parts: ProcessGroup | None = None
    "The ranks that hold the gradients of different parameters each: the norm of all gradients is taken over them."
    shared: Sequence[nn.Parameter] = ()
    "Parameters that all of `parts` hold: they count once."
    is_divided: bool = False
    "Whether ranks hold different whole tensors of the state: a checkpoint then collects who holds which."
    divides_samples: bool = False
    "Whether ranks with the same part of a batch see different positions of its samples: metrics count all of them."
    inference_mode: bool = True
    "Whether evaluation may run under `torch.inference_mode`; sharded parameters do not support it."

    def __init__(self, device: str | torch.device = "auto"):
        self.device = pick_device(device)
        self.computes_in: dict[str, str] = {}
        "What plugins compute in beside the type of the weights, by their names: `bf16`."
        self._on_cpu = self.device.type == "cpu"

    @property
    def is_main(self) -> bool:
        """Whether this process writes the logs."""
        return self.rank == 0

    @property
    def seed_rank(self) -> int:
        """The number that tells this rank's random numbers from those of others."""
        return self.data_rank

    @property
    def mean_rank(self) -> int:
        """Which part of every global batch this rank sees: ranks with the same one hold a model together."""
        return 0

    def holds(self, path: tuple[str | int, ...]) -> bool:
        """Whether this rank keeps the tensor at a path of a checkpoint; it does not read the others."""
        return True

    def place(self, task: nn.Module) -> None:
        """Bring the task to the device, in place."""
        task.to(self.device)

    def move(self, batch: Any) -> Any:
        """Return the batch with every tensor on the device: tuples, lists, dicts, dataclasses, anything with `.to`."""
        if self._on_cpu and isinstance(batch, (tuple, list)):
            for item in batch:  # most batches are flat tuples of tensors in host memory, with nothing to move
                if not isinstance(item, torch.Tensor) or not item.is_cpu:
                    break
            else:
                return batch
        return move(batch, self.device)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, on the device."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks; plain data, over the host."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value; plain data, over the host."""
        return value

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 and return its result on every rank."""
        return make()

    def all_max(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each number over all ranks, over the host and without a device synchronisation."""
        return list(numbers)

    def copy_from_first(self, module: nn.Module, parameters: bool = True) -> None:
        """Copy rank 0's buffers, and its parameters unless False, to every rank, in place."""

    def no_timeout(self) -> AbstractContextManager[None]:
        """Suspend the stall timeout: for work on one rank, such as a save, that the others wait for."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def __repr__(self) -> str:
        return f"Env({self.device}, rank {self.rank} of {self.world})"


def pick_device(device: str | torch.device) -> torch.device:
    """Return the device, "auto" as CUDA, MPS or CPU; raise ForgeError if this machine does not have it."""
    if device == "auto":
        device = auto_device()
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ForgeError(f"device={device!r} is not a device. Use 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'.") from error
    if picked.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (picked.index or 0) >= count:
            raise ForgeError(f"device={str(device)!r}: this machine has {count} CUDA devices. Use device='auto'.")
        picked = torch.device("cuda", picked.index if picked.index is not None else torch.cuda.current_device())
    elif picked.type == "mps" and not torch.backends.mps.is_available():
        raise ForgeError("device='mps' is not available on this machine. Use device='auto'.")
    return picked


def auto_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def move(value: Any, device: torch.device) -> Any:
    """Return `value` with every tensor on `device`; tensors that are there already are not copied."""
    if isinstance(value, torch.Tensor):
        # a copy to the host must have arrived before it is read
        return value if value.device == device else value.to(device, non_blocking=device.type != "cpu")
    if callable(getattr(type(value), "to", None)):  # packed sequences, tokenizer outputs, graph batches
        moved = value.to(device)
        return value if moved is None else moved  # some move in place, and return nothing
    moved = map_items(value, lambda item: move(item, device))
    return value if moved is None else moved


def map_items(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a tuple, list, mutable mapping or dataclass of the same kind with `function` applied to its items; None
    for any other value."""
    if isinstance(value, tuple):
        items = [function(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return type(value)(function(item) for item in value)
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)  # keeps its type and its attributes
        for key, item in value.items():
            copied[key] = function(item)
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, function(getattr(value, field.name)))  # frozen ones too
        return copied
    return None
