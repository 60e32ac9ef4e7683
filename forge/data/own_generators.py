"""Generators that a dataset, its transforms or a loader keep in this process: where they are, and their state."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from forge.util.generators import Generators, find_generators, generator_state


def data_roots(loader: Any, stage: str = "train", copied: bool = False) -> dict[str, Any]:
    """Return the objects that make a loader's samples, by name; those that workers have `copied` only if asked for."""
    inner = loader
    while _is_ours(inner) and hasattr(inner, "loader"):
        inner = inner.loader
    if _is_ours(inner) and hasattr(inner, "loaders"):
        each = [data_roots(part, f"{stage} {name}", copied) for name, part in inner.loaders.items()]
        return {name: root for roots in each for name, root in roots.items()}
    if _is_ours(inner) and not isinstance(inner, DataLoader):  # its own position is saved
        given = {} if hasattr(inner, "batches") else vars(inner)
        return {f"{stage} loader.{name}": value for name, value in given.items() if not name.startswith("_")}
    if not isinstance(inner, DataLoader):
        return {f"{stage} loader": inner}
    source = inner.dataset
    made_by: Any = (source.dataset, source.collate) if _is_seeded(source) else (source, inner.collate_fn)  # pyright: ignore[reportAttributeAccessIssue]
    here = copied or not inner.num_workers
    return {} if not here else {f"{stage} dataset": made_by[0], f"{stage} collate_fn": made_by[1]}


def data_states(loader: Any) -> dict[str, Any]:
    """Return the states of a training loader's generators after the last batch handed out."""
    inner = loader
    while _is_ours(inner) and hasattr(inner, "loader"):
        drawn = vars(inner).get("drawn")
        if drawn is not None:
            return drawn
        inner = inner.loader
    return states_of(find_generators(data_roots(loader)))


def states_of(found: Generators) -> dict[str, Any]:
    """Return the states of generators by path."""
    return {path: generator_state(generator) for path, generator in found.items()}


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("forge.data.")


def _is_seeded(source: Any) -> bool:
    """Whether this is one of the datasets around a user's that seed per sample."""
    return _is_ours(source) and hasattr(source, "dataset") and hasattr(source, "collate")
