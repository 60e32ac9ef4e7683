"""Env: where a run happens. One process on one device here; `forge.distributed` has the one for many."""

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
    from torch.distributed import Store
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class Env:
    """One process on one device: device, rank, world, reductions and agreement.

    A strategy returns one of its own from `forge_setup_env`: a `forge.distributed.DistributedEnv`. With one process
    reductions return their argument.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    "Which of the processes on this host."
    data_rank: int = 0
    "Which share of every global batch is trained on here."
    data_world: int = 1
    "How many shares there are: as many as ranks, unless several ranks hold one model between them."
    mesh: DeviceMesh | None = None
    "The processes as torch's device mesh."
    store: Store | None = None
    "What all processes can read and write without waiting for each other."
    inference_mode: bool = True
    "Whether evaluation may run under `torch.inference_mode`, which sharded parameters cannot bear."

    def __init__(self, device: str | torch.device = "auto"):
        self.device = pick_device(device)
        self._on_cpu = self.device.type == "cpu"

    @property
    def is_main(self) -> bool:
        """Whether this process writes the logs."""
        return self.rank == 0

    def place(self, task: nn.Module) -> None:
        """Bring the task to the device, in place."""
        task.to(self.device)

    def move(self, batch: Any) -> Any:
        """The batch with every tensor in it on the device: tuples, lists, dicts, dataclasses, anything with `.to`."""
        if self._on_cpu and isinstance(batch, (tuple, list)):
            for item in batch:  # most batches are flat tuples of tensors in host memory: nothing to move
                if not isinstance(item, torch.Tensor) or not item.is_cpu:
                    break
            else:
                return batch
        return move(batch, self.device)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on the device."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks; plain data, over the host."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value; plain data, over the host."""
        return value

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 gets from calling `make`; the other ranks wait for it."""
        return make()

    def all_max(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each number over all ranks, over the host: small, and without a look at the device."""
        return list(numbers)

    def copy_from_first(self, module: nn.Module, parameters: bool = True) -> None:
        """Give every rank rank 0's buffers, and its parameters unless they are left out; in place."""

    def no_timeout(self) -> AbstractContextManager[None]:
        """Around what may take long on one rank while the others wait: it is not taken for a stall."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait until the device has done everything asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def __repr__(self) -> str:
        return f"Env({self.device}, rank {self.rank} of {self.world})"


def pick_device(device: str | torch.device) -> torch.device:
    """ "auto" is CUDA, then MPS, then CPU; a device that is not there is refused with what there is."""
    if device == "auto":
        device = auto_device()
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ForgeError(f"device={device!r} is no device. Use 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'.") from error
    if picked.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (picked.index or 0) >= count:
            raise ForgeError(f"device={str(device)!r}: this machine has {count} CUDA devices. Use device='auto'.")
        picked = torch.device("cuda", picked.index if picked.index is not None else torch.cuda.current_device())
    elif picked.type == "mps" and not torch.backends.mps.is_available():
        raise ForgeError("device='mps' is not available on this machine. Use device='auto'.")
    return picked


def auto_device() -> str:
    """The best there is."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def move(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`; what is there already is returned as it is."""
    if isinstance(value, torch.Tensor):
        # towards the host a copy must have arrived before it is read
        return value if value.device == device else value.to(device, non_blocking=device.type != "cpu")
    if callable(getattr(type(value), "to", None)):  # packed sequences, tokenizer outputs, graph batches
        return value.to(device)
    if isinstance(value, tuple):
        items = [move(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return type(value)(move(item, device) for item in value)
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)  # of the same kind, with all that it holds beside its items
        for key, item in value.items():
            copied[key] = move(item, device)
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, move(getattr(value, field.name), device))  # frozen ones too
        return copied
    return value
