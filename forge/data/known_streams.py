"""What forge knows of streams of other packages: whose state leaves samples out, who divides samples among ranks."""

from __future__ import annotations

from typing import Any

from forge.util.walk import walk

_RANKS = {
    "lance": "Use lance.torch.data.SafeLanceDataset in a forge.data.Loader",
    "webdataset": "Pass nodesplitter=lambda shards: shards, so that all ranks read the same samples",
}


def how_to_divide(loader: Any) -> str | None:
    """Return how to read the data of a package so that all ranks read the same batches; None for an unknown class."""
    return _RANKS.get(_package(dataset_of(loader)))


def leaves_out_samples(data: Any) -> bool:
    """Whether `data` is, or holds, a stream of Hugging Face's `datasets` that shuffles: its state is the place from
    which its buffer was filled, without the samples that are in the buffer."""
    return any(_shuffles(value) for _, value in walk({"data": data}) if _package(value) == "datasets")


def dataset_of(loader: Any) -> Any:
    """Return the dataset of a loader, inside all wrappers; the loader itself if it has none."""
    while not hasattr(loader, "dataset") and hasattr(loader, "loader"):
        loader = loader.loader
    return getattr(loader, "dataset", loader)


def divided_by(data: Any, world: int) -> str | None:
    """Return how to keep a dataset from dividing its samples among this many ranks itself; None if it does not."""
    package = _package(data)
    split = getattr(data, "_distributed", None)
    if package == "datasets" and split is not None and split.world_size > 1:
        return "Leave split_dataset_by_node out"
    if package == "streaming" and hasattr(data, "replication") and (data.replication or 1) != world:
        return f"Pass replication={world} to StreamingDataset, so that all ranks read the same samples"
    return None


def streams_in_nodes(loader: Any) -> list[Any]:
    """Return the streams with `set_epoch` that a loader of torchdata.nodes reads."""
    if not type(loader).__module__.startswith("torchdata.nodes"):
        return []
    return [value for _, value in walk({"loader": loader}) if callable(getattr(value, "set_epoch", None))]


def _shuffles(dataset: Any) -> bool:
    waiting: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        step = waiting.pop()
        if hasattr(step, "buffer_size"):
            return True
        waiting += [step.ex_iterable] if hasattr(step, "ex_iterable") else getattr(step, "ex_iterables", ())
    return False


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]
