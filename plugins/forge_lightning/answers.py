"""What a LightningModule asks for while it runs: `self.log`, `self.optimizers()`, `self.all_gather`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from forge.errors import TaskError
from forge.metrics.torchmetrics import is_metric
from forge_lightning import carried
from forge_lightning.logged import Logged, computed, in_training, logged, refuse_on_one_rank
from forge_lightning.wrapping import Wrapped


class Answers(Wrapped):
    """forge's answers in place of Lightning's."""

    def _listening(self, weight: Any, function: Callable[..., Any], *arguments: Any) -> tuple[Any, list[Logged]]:
        """Call a step; what it returned, and what it logged meanwhile."""
        self._calls, self._weight = [], weight
        try:
            return carried.call(function, *arguments), self._calls
        finally:
            self._calls = None

    def _weigh(self, call: Logged) -> Any:
        """What a logged value weighs: the batch_size it was logged with, else the batch's; a borrowed one nothing."""
        return call.weight if call.weight is not None and self._weight else self._weight

    def _add_in_training(self, name: str, call: Logged) -> None:
        raise NotImplementedError

    def _count_between(self, call: Logged) -> None:
        raise NotImplementedError

    def _answer_log(self, name: str, value: Any, *args: Any, rank_zero_only: bool = False, **options: Any) -> None:
        who = type(self.module).__name__
        if self.trainer is None:
            return  # as in Lightning: steps can be called by hand
        if hasattr(value, "compute_groups"):
            members = value.items(keep_base=False, copy_state=False)
            options["rank_zero_only"] = rank_zero_only
            self._answer_log_dict({f"{name}/{key}": member for key, member in members}, *args, **options)
            return
        call = logged(who, name, value, *args, **options)
        if rank_zero_only:
            refuse_on_one_rank(who, name, self.trainer.env.world)
        if self._calls is not None:
            self._calls.append(call)
        elif self.stage == "predict":
            raise TaskError(f"{who}: self.log({name!r}) in predict: there is nothing that it would be logged to.")
        else:
            self._log_between(call)

    def _log_between(self, call: Logged) -> None:
        """`self.log` in a hook rather than in a step."""
        if self.stage is not None:
            self._count_between(call)
            return
        assert self.trainer is not None
        if self.epoch_is_over and self._epoch is not None:  # what is logged at its end is the value for it
            self.names[call.name] = name = in_training(call.name)
            if is_metric(call.value):
                self._epoch.metrics.add_name(name, call.value)
                self.fresh |= computed(self._epoch.metrics, self.trainer.env)
            else:
                self._epoch.means.add(name, call.value)
                self.fresh[name] = float(call.value)
        else:
            self._add_in_training(in_training(call.name), call)

    def _answer_log_dict(self, dictionary: Any, *args: Any, **options: Any) -> None:
        several = hasattr(dictionary, "compute_groups")
        items = dictionary.items(keep_base=False, copy_state=False) if several else dictionary.items()
        for name, value in items:
            self._answer_log(name, value, *args, **options)

    def _answer_optimizers(self, use_pl_optimizer: bool = True) -> Any:
        assert self.trainer is not None
        return self.trainer.optimizers[None]

    def _answer_lr_schedulers(self) -> Any:
        schedulers = [getattr(item.schedule, "scheduler", item.schedule) for item in self._schedules]
        return schedulers[0] if len(schedulers) == 1 else schedulers or None

    def _answer_clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if not gradient_clip_val:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) or "norm") == "value":
            nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        else:
            nn.utils.clip_grad_norm_(parameters, gradient_clip_val)

    def _answer_all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        assert self.trainer is not None
        env = self.trainer.env
        if sync_grads and env.world > 1:
            raise TaskError("self.all_gather(sync_grads=True) is not carried over: gradients do not travel through it.")
        leaves, form = tree_flatten(data)
        numbers = {i: value for i, value in enumerate(leaves) if isinstance(value, (Tensor, int, float))}
        own = {i: torch.as_tensor(value, device=env.device).detach().contiguous() for i, value in numbers.items()}
        if env.world > 1:
            size = torch.distributed.get_world_size(group)
            self._refuse_uneven([(str(value.dtype), tuple(value.shape)) for value in own.values()], size, group)
            for i, value in own.items():
                parts = [torch.empty_like(value) for _ in range(size)]
                torch.distributed.all_gather(parts, value, group=group)
                own[i] = torch.stack(parts)
        return tree_unflatten([own.get(i, value) for i, value in enumerate(leaves)], form)

    def _refuse_uneven(self, kinds: list[tuple[str, tuple[int, ...]]], size: int, group: Any) -> None:
        """Every rank's share must have the same dtype and shape; another would be waited for without an end."""
        assert self.trainer is not None
        by_rank: list[Any] = [None] * size
        if group is None:
            by_rank = self.trainer.env.gather(kinds)
        else:
            torch.distributed.all_gather_object(by_rank, kinds, group=group)
        if all(each == by_rank[0] for each in by_rank):
            return
        told = {
            rank: ", ".join(f"{dtype.removeprefix('torch.')} {shape}" for dtype, shape in each)
            for rank, each in enumerate(by_rank)
        }
        raise TaskError(
            f"{type(self.module).__name__}: self.all_gather has shares that differ: "
            f"{'; '.join(f'rank {rank} has {what}' for rank, what in list(told.items())[:4])}. Gather what is as large "
            "on every rank: a sum and a count, or tensors padded to one shape."
        )
