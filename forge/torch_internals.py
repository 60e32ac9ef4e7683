"""The seam to torch: the only module of forge that reaches private names of torch, and the way packages list theirs.

`NAMES` lists each with what it is for and what becomes of it without, on the day that torch has it no longer. It is
resolved when it is first asked for: `from forge.torch_internals import pytree`. A missing one is replaced by its
`or_else`, or refuses by name when it is used, not when it is imported. `forge env` prints those that are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from forge.errors import ForgeError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Internal:
    """A private name of torch."""

    path: str
    why: str
    "What it is for: completes `forge uses it to …`."
    without: str
    "What is different without it: a sentence."
    parts: str = ""
    "Names inside it that are used too, with spaces between them."
    or_else: Callable[[], Any] | None = None
    "Makes what stands in its place where it is missing."
    since: str = "2.10"
    "The first torch that has it, of those that forge supports."
    build: str = ""
    "The public function of torch that says whether a build has what it is for; empty: all builds have."
    changes: bool = False
    "Whether torch binds the name anew at times, so that it is looked up at each use."

    def find(self) -> tuple[Any, list[str]]:
        """Return the object, or None, and the dotted names that are missing: of itself, or of its parts."""
        found: Any = import_module("torch")
        place = "torch"
        for part in self.path.split(".")[1:]:
            place += f".{part}"
            try:
                found = getattr(found, part) if hasattr(found, part) else import_module(place)
            except Exception:  # a module that is there may fail to import on a build without its backend
                return None, [self.path]
        return found, [f"{self.path}.{part}" for part in self.parts.split() if not hasattr(found, part)]

    def lacking(self) -> list[str]:
        """Return the dotted names that are missing in this torch, of those that its build should have."""
        path, _, function = self.build.rpartition(".")
        is_expected = not self.build or getattr(import_module(path), function)()
        return self.find()[1] if is_expected else []

    def get(self) -> Any:
        """Return the object; where it or a part is missing, its `or_else`, or one that refuses to be used."""
        found, missing = self.find()
        if not missing:
            return found
        return Missing(self, found, missing[0]) if self.or_else is None else self.or_else()


class Missing:
    """Stands for a name that this torch does not have, and refuses to be used. No object is an instance of it."""

    def __init__(self, internal: Internal, found: Any, name: str):
        self._refusal = internal, found, name

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        internal, _, name = self._refusal
        raise ForgeError(
            f"torch {import_module('torch').__version__} has no {name}, which forge uses to {internal.why}. "
            f"{internal.without} Use another version of torch; `forge env` shows what this one lacks."
        )

    __call__ = _refuse

    def __getattr__(self, part: str) -> Any:
        if part.startswith("__"):
            raise AttributeError(part)
        _, found, _ = self._refusal
        return getattr(found, part) if hasattr(found, part) else self._refuse()

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (type("Refused", (), {"__new__": self._refuse}),)


def resolve(name: str, names: Mapping[str, Internal], module: dict[str, Any]) -> Any:
    """Return a listed name, and keep it in its module (`globals()`): the body of `__getattr__` of a torch_internals."""
    if name not in names:
        raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
    value = names[name].get()
    if not names[name].changes:
        module[name] = value
    return value


def dynamo_is_loaded() -> bool:
    """Return whether torch.compile is in use; importing it takes seconds."""
    return "torch._dynamo" in sys.modules


def writes(tensor: Tensor) -> int:
    """Return how often a tensor was written in place, by torch's count: -1 in inference mode, where it keeps none."""
    return -1 if tensor.is_inference() else tensor._version


def foreach(method: str) -> Internal:
    """List one of torch's functions over many tensors."""
    why, without = "work on many tensors in a few kernels", "Each tensor takes kernels of its own, to the same bits."
    return Internal(f"torch._foreach_{method}", why, without, or_else=lambda: partial(_one_by_one, method))


def _one_by_one(method: str, tensors: Any, *others: Any, **options: Any) -> list[Any]:
    columns = [other if isinstance(other, (list, tuple)) else [other] * len(tensors) for other in others]
    return [getattr(tensor, method)(*row, **options) for tensor, *row in zip(tensors, *columns, strict=True)]


def _batch_norms() -> tuple[type, ...]:
    from torch import nn

    return nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def _nothing(*args: Any) -> None:
    pass


def _broadcast_each(group: Any, tensors: Any, buffer: int, rank: int) -> None:
    for tensor in tensors:
        import_module("torch.distributed").broadcast(tensor, rank, group)


def _mark_each(tensors: Any, flag: Any, one: Any) -> None:
    """Set `flag` to 1 on the device if an entry is NaN or infinite."""
    for tensor in tensors:
        flag.masked_fill_(~tensor.isfinite().all(), 1.0)


_NO_PLAN = "`forge plan` cannot tell memory."
_COUNT = "count the memory of a step that is not run"
_AUTOCAST = "know what autocast widens on CUDA when a step is planned"
_ATTENTION = "choose attention as CUDA does when a step is planned"
_COLLECTIVE = "tell in which collective a rank waits"
_NO_COLLECTIVE = "The report of a stall says less about collectives."
_OPTIMIZER = "torch.optim.optimizer._global_optimizer"
_ADAM = "know whether somebody hears of every optimizer's step"
_NO_ADAM = "Adam takes torch's own step, which costs the host more."
_NCCL = "torch.distributed.is_nccl_available"
_C10D = "torch._C._distributed_c10d"
_DEATH = "hear of a data worker's death where it is safe"
_NO_DEATH = "It is raised at any moment, even inside a save."
_SIGNALS = "torch.utils.data._utils.signal_handling"

NAMES = {
    "pytree": Internal(
        "torch.utils._pytree",
        "find the tensors in batches, outputs and states",
        "Nothing that looks into a batch works.",
        parts="keystr tree_flatten tree_flatten_with_path tree_leaves tree_map tree_map_only tree_unflatten",
    ),
    "TorchDispatchMode": Internal(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "see the operations of a step",
        "Nothing can watch or count the operations of a step.",
    ),
    "BatchNorm": Internal(
        "torch.nn.modules.batchnorm._BatchNorm",
        "know layers with running statistics",
        "A layer that derives from none of torch's public ones is not known to be one.",
        or_else=_batch_norms,
    ),
    "foreach_copy_": foreach("copy_"),
    "mark_non_finite": Internal(
        "torch._amp_foreach_non_finite_check_and_unscale_",
        "look at all gradients in one kernel per dtype",
        "Each gradient takes kernels of its own.",
        or_else=lambda: _mark_each,
    ),
    "profiler_enabled": Internal(
        "torch.autograd._profiler_enabled",
        "know whether a profiler records",
        "A profiler does not see the steps of Adam, and a second one is not refused.",
        or_else=lambda: lambda: False,
    ),
    "global_step_pre_hooks": Internal(f"{_OPTIMIZER}_pre_hooks", _ADAM, _NO_ADAM, or_else=lambda: True),
    "global_step_post_hooks": Internal(f"{_OPTIMIZER}_post_hooks", _ADAM, _NO_ADAM, or_else=lambda: True),
    "inductor_config": Internal(
        "torch._inductor.config",
        "restore compiled code's flag for deterministic kernels",
        "After a deterministic run, torch.compile goes on as torch leaves it.",
        parts="deterministic",
        or_else=lambda: SimpleNamespace(deterministic=None),
    ),
    "dataloader_iterator": Internal(
        "torch.utils.data.DataLoader._get_iterator",
        "know a DataLoader that iterates in its own way",
        "Only one with its own `__iter__` is known.",
        or_else=lambda: None,
    ),
    "watch_worker_pids": Internal(f"{_SIGNALS}._set_worker_pids", _DEATH, _NO_DEATH, or_else=lambda: _nothing),
    "forget_worker_pids": Internal(f"{_SIGNALS}._remove_worker_pids", _DEATH, _NO_DEATH, or_else=lambda: _nothing),
    "check_worker_pids": Internal(
        f"{_SIGNALS}._error_if_any_worker_fails", _DEATH, _NO_DEATH, or_else=lambda: _nothing
    ),
    "dynamo_config": Internal(
        "torch._dynamo.config",
        "set options of torch.compile for a run",
        "torch.compile runs with its own options.",
        parts="patch",
        or_else=lambda: SimpleNamespace(patch=lambda *args, **options: nullcontext()),
    ),
    "leave_to_others": Internal(
        "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
        "leave parameters that ranks divide, as experts, out of the average over all ranks",
        "Experts do not work beside copies of the other layers.",
    ),
    "module_states": Internal(
        "torch.distributed._composable_state._module_state_mapping",
        "undo fully_shard",
        "A task that was sharded cannot be sharded again in the same process.",
        or_else=dict,
    ),
    "StridedShard": Internal(
        "torch.distributed.tensor.placement_types._StridedShard",
        "save weights that two meshes cut along one dimension",
        "A checkpoint of FSDP over tensor parallelism is refused.",
    ),
    "default_store": Internal(
        "torch.distributed.distributed_c10d._get_default_store",
        "share heartbeats and causes of failures between ranks",
        "Several processes cannot train together.",
    ),
    "broadcast_coalesced": Internal(
        "torch.distributed._broadcast_coalesced",
        "copy weights from one rank in a few messages",
        "Each tensor takes its own message.",
        or_else=lambda: _broadcast_each,
    ),
    "process_groups": Internal(
        "torch.distributed.distributed_c10d._world",
        _COLLECTIVE,
        _NO_COLLECTIVE,
        parts="pg_group_ranks pg_names",
        or_else=lambda: SimpleNamespace(pg_group_ranks={}, pg_names={}),
        changes=True,
    ),
    "dump_gloo_json": Internal(f"{_C10D}._dump_fr_trace_json", _COLLECTIVE, _NO_COLLECTIVE, or_else=lambda: None),
    "dump_nccl_json": Internal(
        f"{_C10D}._dump_nccl_trace_json", _COLLECTIVE, _NO_COLLECTIVE, or_else=lambda: None, build=_NCCL
    ),
    "dump_nccl": Internal(f"{_C10D}._dump_nccl_trace", _COLLECTIVE, _NO_COLLECTIVE, or_else=lambda: None, build=_NCCL),
    "fake_tensors": Internal(
        "torch._subclasses.fake_tensor",
        "run a step on shapes alone",
        f"{_NO_PLAN} FLOPs of a step are not counted.",
        parts="FakeTensor FakeTensorMode DataDependentOutputException DynamicOutputShapeException "
        "UnsupportedFakeTensorException UnsupportedOperatorException",
    ),
    "MemTracker": Internal("torch.distributed._tools.mem_tracker.MemTracker", _COUNT, _NO_PLAN),
    "MemKind": Internal("torch.distributed._tools.mem_tracker._MemRefType", _COUNT, _NO_PLAN),
    "operator_names": Internal("torch._C._dispatch_get_all_op_names", _AUTOCAST, _NO_PLAN),
    "has_kernel": Internal("torch._C._dispatch_has_kernel_for_dispatch_key", _AUTOCAST, _NO_PLAN),
    "local_scalar": Internal(
        "torch.ops.aten._local_scalar_dense.default",
        "answer a plugin that reads a number in a plan",
        f"With plugins that read numbers, {_NO_PLAN}",
    ),
    "attention_math": Internal("torch.ops.aten._scaled_dot_product_attention_math", _ATTENTION, _NO_PLAN),
    "attention_flash": Internal("torch.ops.aten._scaled_dot_product_flash_attention", _ATTENTION, _NO_PLAN),
    "attention_efficient": Internal("torch.ops.aten._scaled_dot_product_efficient_attention", _ATTENTION, _NO_PLAN),
}


def __getattr__(name: str) -> Any:
    return resolve(name, NAMES, globals())
