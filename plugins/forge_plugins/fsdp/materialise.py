"""Initialise a task from the meta device on the host, module by module, in the task's order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from forge.errors import TaskError
from forge.optim.sharded import is_distributed
from forge.util.patterns import MANY, listed

RESETS = ("reset_parameters", "_reset_parameters")
"""Names of the method that initialises a module; the second is that of torch's MultiheadAttention."""
INIT = "init_weights"


def has_meta(module: nn.Module) -> bool:
    """Whether a module has tensors on the meta device."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def inside_out(module: nn.Module) -> Iterator[nn.Module]:
    """Yield every module once, children before parents: the order in which a constructor finishes them."""
    seen: set[int] = set()

    def visit(one: nn.Module) -> Iterator[nn.Module]:
        if id(one) in seen:
            return
        seen.add(id(one))
        for child in one.children():
            yield from visit(child)
        yield one

    return visit(module)


class Materialiser:
    """Gives modules memory and initial weights: by `reset_parameters`, then by the task's `init_weights(module)`.

    Random numbers come from the host's generator, so the weights equal those of a task made normally there.
    """

    def __init__(self, task: nn.Module):
        self._task = task
        self._init: Callable[[nn.Module], Any] | None = getattr(task, INIT, None)
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        "The replacement of each meta tensor, by its id: a tied one is made once."
        self._divided: dict[int, tuple[Any, list[tuple[nn.Module, str]]]] = {}
        "Parameters divided by tensor parallelism, and their places."
        self._refuse()

    def fill(self, module: nn.Module) -> None:
        """Initialise the tensors of one module, without its children."""
        own = _meta_names(module)
        if not own:
            return
        for name in own:
            self._allocate(module, name)
        reset = _reset(module)
        if reset is not None:
            reset()
        if self._init is not None:
            self._init(module)
        self._refuse_left_out(module, own)

    def settle(self, device: torch.device, module: nn.Module) -> None:
        """Move a filled module to its device, and divide its parameters again."""
        module.to(device)
        for old, places in self._divided.values():
            whole = self._made[id(old)][1].detach()  # all ranks have it: nothing is sent
            part = distribute_tensor(whole, old.device_mesh, old.placements, src_data_rank=None)
            part = nn.Parameter(part, requires_grad=old.requires_grad)
            for owner, name in places:
                owner._parameters[name] = part
        self._divided.clear()

    def _allocate(self, module: nn.Module, name: str) -> None:
        held: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        old = held[name]
        if id(old) not in self._made:
            self._made[id(old)] = (old, _empty(old))
        if is_distributed(old):
            self._divided.setdefault(id(old), (old, []))[1].append((module, name))
        held[name] = self._made[id(old)][1]

    def _refuse(self) -> None:
        if self._init is not None:
            try:
                inspect.signature(self._init).bind(self._task)
            except TypeError as error:
                raise TaskError(
                    f"{type(self._task).__name__}.{INIT} is called with each module in turn, to initialise its "
                    f"own weights, so that no more than a block is whole at a time: def {INIT}(self, module)."
                ) from error
            return
        named = self._task.named_modules()
        lost = [name or type(self._task).__name__ for name, m in named if _meta_names(m) and _reset(m) is None]
        if lost:
            raise TaskError(
                f"fsdp cannot initialise a task from the meta device: {listed(lost, MANY)} of "
                f"{type(self._task).__name__} has parameters or buffers, and no reset_parameters() to set them. "
                f"Define that, or {INIT}(self, module) in the task, or make the task normally (fsdp.meta=false)."
            )

    def _refuse_left_out(self, module: nn.Module, names: list[str]) -> None:
        """Refuse tensors that were not set: their memory still holds NaN."""
        tensors = dict(_own(module))
        left = [name for name in names if tensors[name].is_floating_point() and bool(tensors[name].isnan().any())]
        if left:
            where = next(name for name, inner in self._task.named_modules() if inner is module)
            raise TaskError(
                f"fsdp: {listed([f'{where}.{name}'.strip('.') for name in left])} of a task from the meta device has "
                f"no initial values: neither {type(module).__name__}.reset_parameters() nor the task's {INIT} sets all "
                "of it."
            )


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _meta_names(module: nn.Module) -> list[str]:
    return [name for name, tensor in _own(module) if tensor.is_meta]


def _reset(module: nn.Module) -> Callable[[], Any] | None:
    return next((getattr(module, name) for name in RESETS if callable(getattr(module, name, None))), None)


def _empty(tensor: Tensor) -> Tensor:
    """Return memory on the host for a meta tensor, of full size for a DTensor."""
    filler = float("nan") if tensor.is_floating_point() else 0
    made = torch.full(tensor.shape, filler, dtype=tensor.dtype, device="cpu")
    if not isinstance(tensor, nn.Parameter):
        return made
    parameter = nn.Parameter(made, requires_grad=tensor.requires_grad)
    if not is_distributed(tensor):
        vars(parameter).update(vars(tensor))
    return parameter
