"""What ranks must have in common before they begin, compared once: a difference is named, and never waited for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import Subset

from forge.data.order import digest
from forge.data.windows import length_of
from forge.errors import DataError, TaskError
from forge.snapshot.fingerprint import differences

if TYPE_CHECKING:
    from forge.contract.run import Run
    from forge.env import Env

logger = logging.getLogger("forge")


def refuse_different_models(trainer: Run) -> None:
    """Compare the task's parameters over all ranks, before anything is sent from one to another."""
    shapes = {name: list(p.shape) for name, p in trainer.task.named_parameters() if not is_lazy(p)}
    by_rank = trainer.env.gather(shapes)
    for rank, theirs in enumerate(by_rank):
        odd = [name for name in {**by_rank[0], **theirs} if by_rank[0].get(name) != theirs.get(name)]
        if odd:
            raise TaskError(
                f"{type(trainer.task).__name__} is another model on rank {rank} than on rank 0: {', '.join(odd[:3])} "
                f"{'differs' if len(odd) == 1 else 'differ'}. Build the same on every rank; ranks differ only in data."
            )


def refuse_different_data(trainer: Run) -> None:
    """Compare the number of batches of every loader over all ranks, and what decides their order."""
    named = {(stage, name): loader for stage, each in trainer.loaders.items() for name, loader in each.items()}
    lengths = {stage if name is None else f"{stage}/{name}": length_of(x) for (stage, name), x in named.items()}
    orders = {stage: _order(loader) for stage, loader in zip(lengths, named.values(), strict=True)}
    by_rank = trainer.env.gather((lengths, orders))
    for stage in lengths:
        counts = [theirs.get(stage) for theirs, _ in by_rank]
        if len(set(counts)) > 1:
            told = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(counts))
            raise DataError(
                f"The ranks disagree on the number of {stage} batches: {told}. Give every rank the same loader of "
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
    """What decides which samples a loader gives, and when, as far as it can be told."""
    tell = getattr(loader, "fingerprint", None)
    told: dict[str, Any] = dict(tell()) if tell is not None else {}
    dataset, depth = getattr(loader, "dataset", None), 0
    while isinstance(dataset, Subset):
        told[f"subset {depth}"] = digest(torch.as_tensor(list(dataset.indices), dtype=torch.int64))
        dataset, depth = dataset.dataset, depth + 1
    return told


def refuse_different_windows(env: Env, batches: int, ends_epoch: bool) -> None:
    """For a loader without a length: every rank must have as many batches in this window, and end with it or not."""
    own = (batches, int(ends_epoch))
    most = env.all_max([*own, *(-number for number in own)])
    if most[:2] == [-number for number in most[2:]]:
        return
    told = "; ".join(
        f"rank {rank} has {count} in its next window{' and then no more' if last else ''}"
        for rank, (count, last) in enumerate(env.gather(own))
    )
    raise DataError(
        f"The ranks disagree on the number of batches: {told}. A loader without a length must give every rank the same "
        "global batches; forge takes each rank's share of them."
    )


def tell_shares(trainer: Run) -> None:
    """Say once, on rank 0, what a global batch comes to on each rank."""
    env, loader = trainer.env, trainer.loaders["train"][None]
    size = getattr(loader, "batch_size", None)
    if env.data_world == 1 or not env.is_main or not isinstance(size, int):
        return
    each, rest = divmod(size, env.data_world)
    if rest:
        logger.warning(
            "A global batch of %d samples on %d ranks is %d or %d each: the others wait for those with more. A batch "
            "size that is a multiple of %d wastes nothing.",
            size,
            env.data_world,
            each,
            each + 1,
            env.data_world,
        )
    else:
        logger.info("A global batch of %d samples is %d on each of %d ranks.", size, each, env.data_world)
