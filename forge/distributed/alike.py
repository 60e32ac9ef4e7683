"""What ranks must have in common before they begin, compared once: a difference is named, and never waited for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from forge.data.feed import length_of
from forge.errors import DataError, TaskError

if TYPE_CHECKING:
    from forge.env import Env
    from forge.trainer import Trainer

logger = logging.getLogger("forge")


def refuse_different_models(trainer: Trainer) -> None:
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


def refuse_different_lengths(trainer: Trainer) -> None:
    """Compare the number of batches of every loader over all ranks."""
    named = {(stage, name): loader for stage, each in trainer.loaders.items() for name, loader in each.items()}
    lengths = {stage if name is None else f"{stage}/{name}": length_of(x) for (stage, name), x in named.items()}
    by_rank = trainer.env.gather(lengths)
    for stage in lengths:
        counts = [rank.get(stage) for rank in by_rank]
        if len(set(counts)) > 1:
            told = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(counts))
            raise DataError(
                f"The ranks disagree on the number of {stage} batches: {told}. Give every rank the same loader of "
                "global batches; forge takes each rank's share of them."
            )


def refuse_different_windows(env: Env, batches: int, ends_epoch: bool) -> None:
    """For a loader without a length: every rank must have as many batches in this window, and end with it or not."""
    own = (batches, int(ends_epoch))
    most = env.agree([*own, *(-number for number in own)])
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


def tell_shares(trainer: Trainer) -> None:
    """Say once what a global batch comes to on each rank."""
    env, loader = trainer.env, trainer.loaders["train"][None]
    size = getattr(loader, "batch_size", None)
    if env.shares == 1 or not isinstance(size, int):
        return
    each, rest = divmod(size, env.shares)
    if rest:
        logger.warning(
            "A global batch of %d samples on %d ranks is %d or %d each: the others wait for those with more. A batch "
            "size that is a multiple of %d wastes nothing.",
            size,
            env.shares,
            each,
            each + 1,
            env.shares,
        )
    else:
        logger.info("A global batch of %d samples is %d on each of %d ranks.", size, each, env.shares)
