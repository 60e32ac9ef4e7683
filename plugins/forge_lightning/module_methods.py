"""forge's implementations of LightningModule methods: `self.log`, `self.optimizers()`, `self.all_gather`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forge.data.accumulation_windows import batch_size
from forge.errors import TaskError
from forge.metrics.torchmetrics import is_metric
from forge.torch_internals import pytree
from forge_lightning import compatibility
from forge_lightning.log_calls import (
    LogCall,
    computed,
    in_training,
    parse_log,
    refuse_on_one_rank,
    refuse_other_reductions,
    split,
)
from forge_lightning.module_task import ModuleTask
from forge_lightning.names import short


class ModuleMethods(ModuleTask):
    """Methods that replace the module's own during a run."""

    def _run_and_collect(self, weight: Any, function: Callable[..., Any], *arguments: Any) -> tuple[Any, list[LogCall]]:
        """Call a step; return its output and the calls of `self.log` in it."""
        self._calls, self._weight = [], weight
        try:
            return compatibility.call(function, *arguments), self._calls
        finally:
            self._calls = None

    def _apart(self, stage: str, step: Callable[..., Any], batch: Any) -> dict[str, Any]:
        """Run a step that no run asks for, as experiments on a copy do: return the module's own, with what it logs."""
        if stage == "train" and self.is_manual:
            raise TaskError(f"{type(self.module).__name__} makes its updates itself: its step cannot be run alone.")
        with self._attached():
            output, calls = self._run_and_collect(batch_size(batch) or 1, step, batch, 0)
        loss, extra = split(output)
        logged = {short(call.name, stage): call.value for call in calls if not is_metric(call.value)}
        return {**logged, **extra, **({} if loss is None else {"loss": loss})}

    def _weigh(self, call: LogCall) -> Any:
        """Return the weight of a logged value: its batch_size, else the batch's size; 0 for a padding batch."""
        return call.weight if call.weight is not None and self._weight else self._weight

    def _add_in_training(self, name: str, call: LogCall) -> None:
        raise NotImplementedError

    def _count_between(self, call: LogCall) -> None:
        raise NotImplementedError

    def _module_log(self, name: str, value: Any, *args: Any, rank_zero_only: bool = False, **options: Any) -> None:
        who = type(self.module).__name__
        if self.trainer is None:
            return  # as in Lightning: steps can be called outside a run
        if hasattr(value, "compute_groups"):
            members = value.items(keep_base=False, copy_state=False)
            options["rank_zero_only"] = rank_zero_only
            self._module_log_dict({f"{name}/{key}": member for key, member in members}, *args, **options)
            return
        call = parse_log(who, name, value, *args, **options)
        if call.reduce != "mean":
            refuse_other_reductions(who, name, call.reduce, self.trainer.env.world)
        if rank_zero_only:
            refuse_on_one_rank(who, name, self.trainer.env.world)
        if self._calls is not None:
            self._calls.append(call)
        elif self.stage == "predict":
            raise TaskError(f"{who}: self.log({name!r}) in predict: predictions are not logged. Remove the call.")
        else:
            self._log_between(call)

    def _log_between(self, call: LogCall) -> None:
        """Handle `self.log` in a hook rather than in a step."""
        if self.stage is not None:
            self._count_between(call)
            return
        assert self.trainer is not None
        if self.epoch_is_over and self._epoch is not None:  # values logged at its end are the epoch's
            self.names[call.name] = name = in_training(call.name)
            if is_metric(call.value):
                self._epoch.metrics.add_name(name, call.value)
                self.fresh |= computed(self._epoch.metrics, self.trainer.env)
                self.latest[call.name] = self.fresh.get(name, call.value)
            else:
                self._epoch.means.add(name, call.value)
                self.fresh[name] = self.latest[call.name] = float(call.value)
        else:
            self._add_in_training(in_training(call.name), call)

    def _module_log_dict(self, dictionary: Any, *args: Any, **options: Any) -> None:
        several = hasattr(dictionary, "compute_groups")
        items = dictionary.items(keep_base=False, copy_state=False) if several else dictionary.items()
        for name, value in items:
            self._module_log(name, value, *args, **options)

    def _module_optimizers(self, use_pl_optimizer: bool = True) -> Any:
        own = self.optimizer_proxies() if use_pl_optimizer else self.own_optimizers
        return own[0] if len(own) == 1 else own

    def _module_lr_schedulers(self) -> Any:
        schedulers = [config.scheduler for config in self.scheduler_configs]
        return schedulers[0] if len(schedulers) == 1 else schedulers or None

    def _module_clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if not gradient_clip_val:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) or "norm") == "value":
            nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        else:
            nn.utils.clip_grad_norm_(parameters, gradient_clip_val)

    def _module_all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        assert self.trainer is not None
        env = self.trainer.env
        if sync_grads and env.world > 1:
            raise TaskError("self.all_gather(sync_grads=True) is not supported: gradients do not pass through it.")
        leaves, form = pytree.tree_flatten(data)
        numbers = {i: value for i, value in enumerate(leaves) if isinstance(value, (Tensor, int, float))}
        own = {i: torch.as_tensor(value, device=env.device).detach().contiguous() for i, value in numbers.items()}
        if env.world > 1:
            size = torch.distributed.get_world_size(group)
            self._refuse_uneven([(str(value.dtype), tuple(value.shape)) for value in own.values()], size, group)
            for i, value in own.items():
                parts = [torch.empty_like(value) for _ in range(size)]
                torch.distributed.all_gather(parts, value, group=group)
                own[i] = torch.stack(parts)
        return pytree.tree_unflatten([own.get(i, value) for i, value in enumerate(leaves)], form)

    def _refuse_uneven(self, kinds: list[tuple[str, tuple[int, ...]]], size: int, group: Any) -> None:
        """Raise TaskError on all ranks unless all have the same dtypes and shapes; the gather would hang."""
        assert self.trainer is not None
        by_rank: list[Any] = [None] * size
        if group is None:
            by_rank = self.trainer.env.gather(kinds)
        else:
            torch.distributed.all_gather_object(by_rank, kinds, group=group)
        if all(each == by_rank[0] for each in by_rank):
            return
        found = {
            rank: ", ".join(f"{dtype.removeprefix('torch.')} {shape}" for dtype, shape in each)
            for rank, each in enumerate(by_rank)
        }
        raise TaskError(
            f"{type(self.module).__name__}: self.all_gather got tensors that differ between ranks: "
            f"{'; '.join(f'rank {rank} has {what}' for rank, what in list(found.items())[:4])}. Gather tensors of one "
            "shape: a sum and a count, or tensors padded to one shape."
        )
