"""Streams with the protocols of other packages: continued to the same bits, or refused; no sample twice.

The stand-ins always run; the packages themselves are in test_streams.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from forge.data import Loader, resumable_reason
from forge.data.adapt import adopt
from forge.data.sharding import RankLoader
from forge.errors import DataError
from forge_plugins import Checkpoint
from tests.forge.snapshot.test_resume import die, live, resumes
from tests.support.profiles import some

SHARDS = [range(0, 7), range(7, 25), range(25, 29), range(29, 45)]


def sample(number: int) -> tuple[torch.Tensor, int]:
    return torch.randn(6, generator=torch.Generator().manual_seed(number)), number % 3


class HubStream(IterableDataset[Any]):
    """Shards in an order of the epoch, as an IterableDataset of `datasets` gives them: a state that was loaded holds
    for every pass over its epoch, and leaves out what is in the shuffle buffer."""

    __module__ = "datasets.iterable_dataset"

    def __init__(self, buffer: int = 1, seed: int = 0):
        self._ex_iterable = SimpleNamespace(ex_iterable=SimpleNamespace())
        if buffer > 1:
            self._ex_iterable.ex_iterable.buffer_size = buffer
        self._distributed: Any = None
        self.buffer, self.seed = buffer, seed
        self.epoch = self.read = 0
        self.loaded: Any = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state

    def __iter__(self) -> Iterator[Any]:
        drawn = random.Random(f"{self.seed} {self.epoch}")
        shards = drawn.sample(SHARDS, len(SHARDS))
        worker = get_worker_info()
        if worker is not None:
            shards = shards[worker.id :: worker.num_workers]
        self.read = self.loaded["read"] if self.loaded and self.loaded["epoch"] == self.epoch else 0
        held: list[int] = []
        for number in [number for shard in shards for number in shard][self.read :]:
            self.read += 1
            held.append(number)
            if len(held) >= self.buffer:
                yield sample(held.pop(drawn.randrange(len(held))))
        yield from map(sample, held)


def as_pairs(rows: list[Any]) -> Any:
    pairs = [(row["x"], row["y"]) if isinstance(row, dict) else row for row in rows]
    return torch.stack([x for x, _ in pairs]), torch.tensor([int(y) for _, y in pairs])


def read(loader: Any) -> list[float]:
    """Return the first value of every sample."""
    return [value for x, _ in loader for value in x[:, 0].tolist()]


ALL = sorted(sample(i)[0][0].item() for shard in SHARDS for i in shard)


# -- resuming ---------------------------------------------------------------------------------------------------------


def check_resume(folder: Path, make: Callable[[], Any]) -> None:
    """Compare a run that is cut in its second epoch with one that is not."""
    resumes(folder, lambda: {"train": make()}, lambda updates: [9], every="2 updates")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("buffer", some([16, 1]))
def test_a_stream_of_the_hub_resumes_to_the_same_bits(tmp_path: Path, buffer: int, workers: int) -> None:
    check_resume(tmp_path, lambda: Loader(HubStream(buffer), 9, num_workers=workers))  # no batch of one, for BatchNorm


# -- loaders of other packages ----------------------------------------------------------------------------------------


def nodes() -> Any:
    nodes = pytest.importorskip("torchdata.nodes")
    batches = nodes.Batcher(nodes.IterableWrapper(HubStream()), 8, drop_last=False)
    return nodes.Loader(nodes.Mapper(batches, as_pairs))


def test_a_stream_in_nodes_of_torchdata_resumes_to_the_same_bits(tmp_path: Path) -> None:
    check_resume(tmp_path, nodes)


def test_a_loader_whose_state_would_lose_samples_is_refused() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    assert resumable_reason(torchdata.StatefulDataLoader(HubStream(), batch_size=8)) is None
    reason = resumable_reason(torchdata.StatefulDataLoader(HubStream(16), batch_size=8))
    assert reason is not None
    assert "leaves out the samples in its shuffle buffer" in reason
    assert "forge.data.Loader" in reason


class Mixed(HubStream):
    """Shuffled without a seed, and without a state: torchdata's loader skips as many of other samples."""

    state_dict = load_state_dict = None  # pyright: ignore[reportAssignmentType]

    def __iter__(self) -> Iterator[Any]:
        return iter(random.SystemRandom().sample(list(super().__iter__()), len(ALL)))


def test_a_state_that_leads_to_another_batch_is_not_continued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    make = lambda: loaders.StatefulDataLoader(Mixed(), batch_size=9)  # noqa: E731
    saves = lambda: [Checkpoint(every="2 updates", background=False)]  # noqa: E731
    die(tmp_path, saves(), 7, train=make())
    with pytest.raises(DataError, match="StatefulDataLoader gives another batch after its state was loaded"):
        live(tmp_path, saves(), train=make())
    live(tmp_path, saves(), train=make(), allow_inexact=True)
    assert "It goes on (allow_inexact)" in caplog.text


def stream_of(package: str, **attributes: Any) -> Any:
    """Return an iterable dataset whose class says that it is of a package."""
    members = {"__module__": f"{package}.data", "__iter__": lambda self: map(sample, range(8)), **attributes}
    return type("PackagesDataset", (IterableDataset,), members)()


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", [1, 16])
def test_ranks_share_out_a_stream_with_every_sample_once(buffer: int) -> None:
    portions = [list(RankLoader(Loader(HubStream(buffer), 8), rank, 2, "train")) for rank in range(2)]
    assert len(portions[0]) == len(portions[1])
    counted = [value for each in portions for p in each for value in p.batch[0][: p.samples, 0].tolist()]
    assert sorted(counted) == ALL


def test_a_dataset_that_divides_itself_is_refused_on_ranks() -> None:
    hub = HubStream()
    hub._distributed = SimpleNamespace(rank=0, world_size=2)
    with pytest.raises(DataError, match="Leave split_dataset_by_node out, and use the global batch size"):
        RankLoader(Loader(hub, 8), 0, 2, "train")
    with pytest.raises(DataError, match="Pass replication=2 to StreamingDataset"):
        RankLoader(DataLoader(stream_of("streaming", replication=None), 4), 0, 2, "train")
    RankLoader(DataLoader(stream_of("streaming", replication=2), 4), 0, 2, "train")


class OtherBatches:
    """The reductions of a rank that has met other batches."""

    world = 2

    def all_max(self, numbers: list[int]) -> list[int]:
        return [number + 1 for number in numbers]

    def gather(self, value: Any) -> list[Any]:
        return [value, "another"]


def test_other_batches_on_another_rank_name_the_packages_cure() -> None:
    loader = adopt(Loader(stream_of("lance"), 4), "train", allow_inexact=True)
    with pytest.raises(DataError, match=r"or divides its data among ranks itself\. Use lance\.torch\.data\.Safe"):
        next(iter(RankLoader(loader, 0, 2, "train", OtherBatches())))  # pyright: ignore[reportArgumentType]
