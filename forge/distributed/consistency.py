"""Compare what all ranks must have in common before training: raise on a difference instead of hanging."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import Subset

from forge.data.accumulation_windows import length_of
from forge.data.marks import CURE, difference, marks, peeked, places, word
from forge.data.order import digest
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


def tell_different_weights(trainer: Run) -> None:
    """Say if ranks begin with other weights: they were not seeded alike, whatever a strategy makes of it."""
    own = {
        name: word(marks(p.detach().reshape(-1)[:: p.numel() // 64 + 1]))
        for name, p in trainer.task.named_parameters()
        if not is_lazy(p) and not p.is_meta and type(p.data) is torch.Tensor
    }
    first = trainer.env.broadcast(own)
    odd = trainer.env.gather(next((name for name in own if first.get(name) != own[name]), None))
    rank = next((rank for rank, name in enumerate(odd) if name is not None), None)
    if rank is not None and trainer.env.is_main:
        logger.warning(
            f"{type(trainer.task).__name__} has other initial weights on rank {rank} than on rank 0 ({odd[rank]}): "
            "that process was not seeded as this one. Make the Trainer, with a seed, before the task, or call "
            "forge.seed first; what else was drawn then, as a split of the data, differs too."
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
    _refuse_different_samples(trainer.env, dict(zip(lengths, named.values(), strict=True)))


def _refuse_different_samples(env: Env, loaders: dict[str, Any]) -> None:
    """Compare some samples of every loader that can be indexed with those of rank 0."""
    indexed = {name: each for stage, loader in loaders.items() for name, each in _indexed(stage, loader)}
    own = {name: peeked(loader) for name, loader in indexed.items()}
    first = env.broadcast(own)
    found = {name: difference(first.get(name, ()), each) for name, each in own.items()}
    for rank, theirs in enumerate(env.gather(found)):
        for name, place in theirs.items():
            if place is not None:
                index, loader = places(indexed[name].peek_at)[place[0]], indexed[name]
                if hasattr(loader, "sample_indices"):
                    index = loader.sample_indices(0, index, index + 1)[0]
                raise DataError(
                    f"The {name} data of rank {rank} are not those of rank 0: the sample with index {index} is another "
                    f"one (its part {place[1]}). Every rank needs the same data in the same order; forge takes each "
                    f"rank's share of it. {CURE}."
                )


def _indexed(name: str, loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield every loader inside this one whose samples can be read one by one, by name."""
    if hasattr(loader, "loaders"):
        for key, inner in loader.loaders.items():
            yield from _indexed(f"{name}/{key}", inner)
    elif hasattr(loader, "peek_at"):
        yield name, loader


def _order(loader: Any) -> dict[str, Any]:
    """Return what is known of a loader's order: its fingerprint, and the indices of its subsets."""
    order: dict[str, Any] = dict(loader.fingerprint()) if hasattr(loader, "fingerprint") else {}
    dataset, depth = getattr(loader, "dataset", None), 0
    while isinstance(dataset, Subset):
        order[f"subset {depth}"] = digest(torch.as_tensor(list(dataset.indices), dtype=torch.int64))
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
