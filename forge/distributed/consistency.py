"""Compare what all ranks must have in common before training: raise on a difference instead of hanging."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import Subset

from forge.data.accumulation_windows import length_of
from forge.data.order import checksum
from forge.errors import DataError, TaskError
from forge.snapshot.fingerprint import differences

if TYPE_CHECKING:
    from forge.contract.run import Run
    from forge.env import Env

logger = logging.getLogger("forge")


def refuse_different_models(trainer: Run) -> None:
    """Compare the task's parameters over all ranks, before the first collective on them."""
    lazy = [name for name, p in trainer.task.named_parameters() if is_lazy(p)]
    if lazy and trainer.verb == "fit":
        raise TaskError(
            f"{type(trainer.task).__name__}: {', '.join(lazy[:3])} {'has' if len(lazy) == 1 else 'have'} no shape "
            "before the first batch (nn.LazyLinear and similar layers), but several ranks divide parameters before it. "
            "Give the layers their sizes, or run a batch through them in the task's __init__: "
            "self.net(torch.zeros(1, ...))."
        )
    shapes = {name: list(p.shape) for name, p in trainer.task.named_parameters() if not is_lazy(p)}
    by_rank = trainer.env.gather(shapes)
    for rank, theirs in enumerate(by_rank):
        odd = [name for name in {**by_rank[0], **theirs} if by_rank[0].get(name) != theirs.get(name)]
        if odd:
            raise TaskError(
                f"{type(trainer.task).__name__} is another model on rank {rank} than on rank 0: {', '.join(odd[:3])} "
                f"{'differs' if len(odd) == 1 else 'differ'}. Build the same model on every rank."
            )


def refuse_different_data(trainer: Run) -> None:
    """Compare the number of batches and the order of every loader over all ranks."""
    named = {(stage, name): loader for stage, each in trainer.loaders.items() for name, loader in each.items()}
    lengths = {stage if name is None else f"{stage}/{name}": length_of(x) for (stage, name), x in named.items()}
    orders = {stage: _order(loader) for stage, loader in zip(lengths, named.values(), strict=True)}
    by_rank = trainer.env.gather((lengths, orders))
    for stage in lengths:
        counts = [theirs.get(stage) for theirs, _ in by_rank]
        if len(set(counts)) > 1:
            found = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(counts))
            raise DataError(
                f"The ranks disagree on the number of {stage} batches: {found}. Give every rank the same loader of "
                "global batches; forge takes each rank's share of them."
            )
        for rank, (_, theirs) in enumerate(by_rank):
            odd = [name for name, _, _ in differences(by_rank[0][1][stage], theirs[stage])]
            if odd:
                raise DataError(
                    f"The {stage} data of rank {rank} are not those of rank 0: they differ in {', '.join(odd)}. Every "
                    "rank needs the same data in the same order (the same seed, the same split); forge takes each "
                    "rank's share of it."
                )


def _order(loader: Any) -> dict[str, Any]:
    """Return what is known of a loader's order: its fingerprint, and the indices of its subsets."""
    order: dict[str, Any] = dict(loader.fingerprint()) if hasattr(loader, "fingerprint") else {}
    dataset, depth = getattr(loader, "dataset", None), 0
    while isinstance(dataset, Subset):
        order[f"subset {depth}"] = checksum(torch.as_tensor(list(dataset.indices), dtype=torch.int64))
        dataset, depth = dataset.dataset, depth + 1
    return order


def refuse_different_windows(env: Env, batches: int, ends_epoch: bool) -> None:
    """For a loader without a length, compare the batches of this window and whether it ends the epoch."""
    own = (batches, int(ends_epoch))
    most = env.all_max([*own, *(-number for number in own)])
    if most[:2] == [-number for number in most[2:]]:
        return
    found = "; ".join(
        f"rank {rank} has {count} in its next window{' and then no more' if last else ''}"
        for rank, (count, last) in enumerate(env.gather(own))
    )
    raise DataError(
        f"The ranks disagree on the number of batches: {found}. A loader without a length must give every rank the "
        "same global batches; forge takes each rank's share of them."
    )


def log_batch_per_rank(trainer: Run) -> None:
    """Log once, on rank 0, how many samples of a global batch each rank gets."""
    env, loader = trainer.env, trainer.loaders["train"][None]
    size = getattr(loader, "batch_size", None)
    if env.data_world == 1 or not env.is_main or not isinstance(size, int):
        return
    each, rest = divmod(size, env.data_world)
    if rest:
        logger.warning(
            f"A global batch of {size} samples on {env.data_world} ranks is {each} or {each + 1} each: ranks with fewer"
            f" wait for the others. Use a batch size that is a multiple of {env.data_world}."
        )
    else:
        logger.info("A global batch of %d samples is %d on each of %d ranks.", size, each, env.data_world)
