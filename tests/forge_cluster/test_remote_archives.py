"""TarShards at URLs: the samples of local ones, a cache that stays bounded, archives that are damaged or cut off."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

import forge
from forge.data import Loader, TarShards
from forge_cluster.storage import archives as shard_cache
from forge_cluster.storage import object_storage
from forge_cluster.storage.archives import RemoteShard, ShardCache, find_shards
from tests.forge.data.test_tar_shards import numbered
from tests.support import forked
from tests.support.patience import PATIENCE, until
from tests.support.profiles import some
from tests.support.s3_server import Proxy, s3_server

__all__ = ["s3_server"]
SHARD = 30_720
"""The bytes of an archive with ten samples of two files."""


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Six archives of ten numbered samples, elsewhere."""
    folder = tmp_path / "there"
    folder.mkdir()
    numbered(folder, [10] * 6)
    return folder


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The archives that were fetched, in their order."""
    names: list[str] = []
    original = LocalFileSystem.get_file

    def get_file(self: LocalFileSystem, path: str, target: str, *rest: Any, **options: Any) -> None:
        names.append(os.path.basename(path))
        original(self, path, target, *rest, **options)

    monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
    monkeypatch.setattr(object_storage, "FIRST_PAUSE", 0.0)
    return names


def at(folder: Path, shards: int = 6) -> str:
    return f"file://{folder}/s-{{000..{shards - 1:03}}}.tar"


def remote(folder: Path, cache: Path, room: float = 100.0, **options: Any) -> TarShards:
    """Return the archives as a dataset whose cache has room for so many of them."""
    return TarShards(at(folder), cache=cache, cache_gb=room * SHARD / 1e9, **options)


def only_one(folder: Path) -> RemoteShard:
    return find_shards([f"file://{folder}/s-000.tar"])[0][0]


CROWD = """
import os, random, sys, threading, traceback
from pathlib import Path
from forge_cluster.storage import archives as shard_cache
from forge_cluster.storage.archives import ShardCache, find_shards
from forge.data.tar_shards import _without_braces

folder, pattern, limit = sys.argv[1:]
shard_cache._WAIT = 0.001
cache = ShardCache(Path(folder), int(limit))
shards = [found[0] for found in find_shards(list(_without_braces(pattern)))]
contents = {shard: Path(shard.url.removeprefix("file://")).read_bytes() for shard in shards}

def read(seed, failures):
    draws = random.Random(seed)
    try:
        for _ in range(40):
            shard = draws.choice(shards)
            descriptor = cache.open(shard)
            assert os.pread(descriptor, shard.size + 1, 0) == contents[shard]
            os.close(descriptor)
            assert cache.used() <= cache.limit
    except BaseException:
        failures.append(traceback.format_exc())

def process(number):
    failures = []
    threads = [threading.Thread(target=read, args=(f"{number} {thread}", failures)) for thread in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    sys.stderr.write("".join(failures))
    sys.stderr.flush()
    os._exit(bool(failures))

children = []
for number in range(4):
    child = os.fork()
    if child == 0:
        process(number)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""
"""Four processes with two threads each, that open archives at random."""


def removed_at(line: int, cache: ShardCache, shard: RemoteShard) -> tuple[int, int]:
    """Open an archive and remove it before this line of the cache's code runs; return the descriptor and all lines."""
    count, path = itertools.count(), cache.folder / shard.name

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != shard_cache.__file__:
            return None
        if event == "line" and next(count) == line:
            path.unlink(missing_ok=True)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        descriptor = cache.open(shard)
    finally:
        sys.settrace(before)
    return descriptor, next(count)


class TestSamples:
    @pytest.mark.parametrize("pattern", ["s-{000..005}.tar", "s-*.tar", "s-00{0,1,2,3,4,5}.tar"])
    def test_they_are_those_of_local_archives(self, there: Path, tmp_path: Path, pattern: str) -> None:
        local = TarShards(there / pattern)
        away = TarShards(f"file://{there}/{pattern}", cache=tmp_path / "cache")
        assert [away[i] for i in range(len(away))] == [local[i] for i in range(60)]

    def test_local_archives_and_urls_go_together_in_order(self, there: Path, tmp_path: Path) -> None:
        names = [f"file://{there}/s-00[45].tar", there / "s-000.tar", f"file://{there}/s-001.tar"]
        mixed = TarShards(names, cache=tmp_path / "cache")
        assert [mixed[i]["cls"] for i in range(40)] == [*range(40, 60), *range(20)]

    @pytest.mark.parametrize("workers", some([0, 2]))
    def test_an_epoch_is_the_same_and_resumes_in_its_middle(self, there: Path, tmp_path: Path, workers: int) -> None:
        def loader(dataset: TarShards) -> Loader:
            return Loader(dataset, batch_size=7, shuffle=True, num_workers=workers, seed=5)

        def labels(batches: Any) -> list[list[int]]:
            return [batch["cls"].tolist() for batch in batches]

        def shards(cache: str) -> TarShards:
            return remote(there, tmp_path / cache, room=5, shuffle_block=4)

        whole = labels(loader(TarShards(there / "s-{000..005}.tar", shuffle_block=4)))
        first = loader(shards("cache"))
        reading = iter(first)
        begun = labels([next(reading) for _ in range(4)])
        again = loader(shards("other"))
        again.seek(0, first.position(0, 4))
        assert begun + labels(again) == whole
        assert sorted(label for batch in whole for label in batch) == list(range(60))

    def test_a_run_trains_from_them_as_from_a_disk(self, there: Path, tmp_path: Path) -> None:
        class Counts(forge.TaskModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(1, 1)

            def training_step(self, batch: Any) -> torch.Tensor:
                return (self.layer(batch["cls"].float()[:, None]) / 60 - 1).square().mean()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.01)

        def trained(dataset: TarShards) -> torch.Tensor:
            torch.manual_seed(0)
            task = Counts()
            loader = Loader(dataset, batch_size=8, shuffle=True)
            forge.Trainer(max_epochs=2, seed=1, plugins=[], run_dir=False).fit(task, loader)
            return task.layer.weight.detach()

        assert trained(remote(there, tmp_path / "cache", room=4)).equal(trained(TarShards(there / "s-*.tar")))


class TestCache:
    def test_it_stays_within_its_limit(self, there: Path, tmp_path: Path, fetched: list[str]) -> None:
        shards = remote(there, tmp_path / "cache", room=3.5)
        most = 0
        for epoch in range(2):
            for position in shards.shuffled(0, epoch).tolist():
                assert shards[position]["cls"] == position
                most = max(most, shards._cache.used())
        assert 3 * SHARD <= most <= shards._cache.limit
        assert set(fetched) == {f"s-00{i}.tar" for i in range(6)}
        assert len(fetched) <= 6 + 12  # once for the headers, and at most once in every epoch

    def test_what_fits_is_fetched_once(self, there: Path, tmp_path: Path, fetched: list[str]) -> None:
        for _ in range(2):
            shards = remote(there, tmp_path / "cache")
            for epoch in range(2):
                assert sorted(shards[i]["cls"] for i in shards.shuffled(0, epoch).tolist()) == list(range(60))
        assert sorted(fetched) == [f"s-00{i}.tar" for i in range(6)]

    def test_many_readers_fetch_an_archive_once(self, there: Path, tmp_path: Path, fetched: list[str]) -> None:
        cache, shard = ShardCache(tmp_path / "cache", 10**9), only_one(there)
        readers = [threading.Thread(target=lambda: os.close(cache.open(shard))) for _ in range(8)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert fetched == ["s-000.tar"]

    def test_the_next_archives_are_fetched_ahead(self, there: Path, tmp_path: Path) -> None:
        remote(there, tmp_path / "cache").index  # noqa: B018 - its headers are known from now on
        for file in (tmp_path / "cache").glob("*.tar"):
            file.unlink()
        shards = remote(there, tmp_path / "cache")
        order = list(dict.fromkeys(int(shards.index.shard[i]) for i in shards.shuffled(0, 0).tolist()))
        shards[order[0] * 10]
        known = shards._remote
        until(lambda: shards._cache.has(known[order[1]]) and shards._cache.has(known[order[2]]))
        assert not shards._cache.has(known[order[5]])

    @pytest.mark.parametrize("next_one", ["s-000.tar", "s-001.tar"])
    def test_room_left_by_a_killed_process_is_used(
        self, there: Path, tmp_path: Path, next_one: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = (
            "import os, signal, sys\n"
            "from pathlib import Path\n"
            "from fsspec.implementations.local import LocalFileSystem\n"
            "from forge_cluster.storage.archives import ShardCache, find_shards\n"
            "LocalFileSystem.get_file = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\n"
            "ShardCache(Path(sys.argv[1]), 40_000).open(find_shards([sys.argv[2]])[0][0])\n"
        )
        words = [sys.executable, "-c", code, str(tmp_path / "cache"), f"file://{there}/s-000.tar"]
        killed = forked.run(words, timeout=PATIENCE)
        assert killed.returncode == -9
        assert list((tmp_path / "cache").glob("*.part"))
        monkeypatch.setattr(shard_cache, "time", None)  # nobody else fetches: there is nothing to wait for
        cache = ShardCache(tmp_path / "cache", 40_000)
        os.close(cache.open(find_shards([f"file://{there}/{next_one}"])[0][0]))
        assert not list((tmp_path / "cache").glob("*.part"))

    @pytest.mark.parametrize("kept", [True, False])
    def test_an_archive_may_be_removed_at_any_line_of_its_opening(
        self, there: Path, tmp_path: Path, kept: bool
    ) -> None:
        """Others make room without asking who is about to read, and users empty their caches."""
        cache, shard = ShardCache(tmp_path / "cache", 10**9), only_one(there)
        for line in itertools.count():
            (cache.folder / shard.name).unlink(missing_ok=True)
            if kept:
                os.close(cache.open(shard))
            descriptor, lines = removed_at(line, cache, shard)
            assert os.pread(descriptor, SHARD + 1, 0) == (there / "s-000.tar").read_bytes()
            os.close(descriptor)
            if line >= lines:
                break
        assert line > 5

    @pytest.mark.slow
    def test_processes_and_threads_share_a_cache_that_is_too_small(self, there: Path, tmp_path: Path) -> None:
        """Each opening removes what the others are about to open: all read what they asked for, within the limit."""
        words = [sys.executable, "-c", CROWD, str(tmp_path / "cache"), at(there), str(int(2.5 * SHARD))]
        run = forked.run(words, timeout=PATIENCE)
        assert run.returncode == 0, run.stderr

    def test_an_archive_larger_than_it_is_refused(self, there: Path, tmp_path: Path) -> None:
        with pytest.raises(forge.DataError, match=r"s-00\d.tar' has .* more than the cache may hold .* Raise cache_gb"):
            len(remote(there, tmp_path / "cache", room=0.5))


class TestIndex:
    def test_beside_the_archives_it_saves_fetching_them(self, there: Path, tmp_path: Path, fetched: list[str]) -> None:
        remote(there, tmp_path / "cache").write_index()
        fetched.clear()
        shards = remote(there, tmp_path / "empty")
        assert len(shards) == 60
        assert fetched == []
        assert shards[35]["cls"] == 35
        assert fetched[0] == "s-003.tar"

    def test_an_archive_that_does_not_match_is_refused(self, there: Path, tmp_path: Path, fetched: list[str]) -> None:
        remote(there, tmp_path / "cache").write_index()
        fetched.clear()
        shards = remote(there, tmp_path / "empty")
        path = there / "s-002.tar"
        data = path.read_bytes()
        path.write_bytes(data[:600] + bytes([data[600] ^ 1]) + data[601:])
        with pytest.raises(forge.DataError, match=r"s-002.tar' is damaged, or has changed .* does not match its hash"):
            shards[25]
        assert fetched.count("s-002.tar") == shard_cache.DOWNLOADS

    @pytest.mark.parametrize(
        "data",
        [
            b"{",
            b"[]",
            b"{}",
            json.dumps({"size": 5, "sha256": "", "samples": {}}).encode(),
            json.dumps({"size": 30720, "sha256": "", "samples": {"a": {"cls": [30000, 9999]}}}).encode(),
            json.dumps({"size": 30720, "sha256": "", "samples": {"a": {"cls": [-1, 2]}}}).encode(),
        ],
    )
    def test_a_damaged_index_is_named(self, there: Path, tmp_path: Path, data: bytes) -> None:
        (there / "s-001.tar.index").write_bytes(data)
        with pytest.raises(forge.DataError, match=r"s-001.tar.index' is .*\. Write it again"):
            len(remote(there, tmp_path / "cache"))

    def test_an_archive_that_was_replaced_is_read_again(self, tmp_path: Path) -> None:
        folder = tmp_path / "there"
        folder.mkdir()
        numbered(folder, [3])
        pattern = f"file://{folder}/s-000.tar"
        assert len(TarShards(pattern, cache=tmp_path / "cache")) == 3
        numbered(folder, [5])
        os.utime(folder / "s-000.tar", (1, 1))
        assert len(TarShards(pattern, cache=tmp_path / "cache")) == 5


class TestFailures:
    def test_a_failed_download_is_tried_again(
        self, there: Path, tmp_path: Path, fetched: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original, calls = LocalFileSystem.get_file, Counter[str]()

        def get_file(self: LocalFileSystem, path: str, target: str, *rest: Any, **options: Any) -> None:
            calls[path] += 1  # archives are fetched by several threads
            if calls[path] == 1:
                raise ConnectionError("reset by peer")
            original(self, path, target, *rest, **options)
            if calls[path] == 2:
                os.truncate(target, 700)

        monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
        shards = remote(there, tmp_path / "cache")
        assert [shards[i]["cls"] for i in range(60)] == list(range(60))
        assert set(calls.values()) == {3}

    def test_what_fails_for_good_is_named_without_secrets(
        self, there: Path, tmp_path: Path, fetched: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush-hush")

        def get_file(*rest: Any, **options: Any) -> None:
            raise ConnectionError("refused for hush-hush-hush")

        monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
        with pytest.raises(forge.DataError, match="cannot be read: ConnectionError: refused for") as caught:
            len(remote(there, tmp_path / "cache"))
        assert "hush" not in str(caught.value)
        assert not list((tmp_path / "cache").glob("*.part"))

    def test_a_missing_archive_is_named_at_once(self, there: Path, tmp_path: Path) -> None:
        with pytest.raises(forge.DataError, match=r"no archive 'file://.*/s-006.tar'. Check the URL"):
            TarShards(at(there, 7), cache=tmp_path / "cache")
        with pytest.raises(forge.DataError, match=r"no archive 'file://.*/t-\*.tar'"):
            TarShards(f"file://{there}/t-*.tar", cache=tmp_path / "cache")

    def test_an_archive_that_was_removed_is_named(self, there: Path, tmp_path: Path) -> None:
        shards = remote(there, tmp_path / "cache")
        (there / "s-003.tar").unlink()
        with pytest.raises(forge.DataError, match=r"s-003.tar' is no longer there"):
            len(shards)

    def test_an_unknown_kind_of_place_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(forge.DataError, match="nowhere"):
            TarShards("nowhere://bucket/a.tar", cache=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 3])
def test_archives_in_s3(s3_server: Proxy, cut: int, there: Path, tmp_path: Path) -> None:
    fs = fsspec.filesystem("s3")
    for path in there.iterdir():
        fs.put_file(str(path), f"bucket/{path.name}")
    s3_server.cut = cut
    options: dict[str, Any] = {"cache_gb": 4.5 * SHARD / 1e9, "shuffle_block": 4}
    away = TarShards("s3://bucket/s-{000..005}.tar", cache=tmp_path / "cache", **options)
    local = TarShards(there / "s-{000..005}.tar", shuffle_block=4)

    def epoch(dataset: TarShards) -> list[list[int]]:
        return [batch["cls"].tolist() for batch in Loader(dataset, batch_size=7, shuffle=True, num_workers=2, seed=2)]

    assert epoch(away) == epoch(local)
    away.write_index()
    again = TarShards("s3://bucket/s-*.tar", cache=tmp_path / "other", **options)
    assert len(again) == 60
    assert not list((tmp_path / "other").glob("*.tar"))
    assert epoch(again) == epoch(local)
    assert s3_server.cuts > 0 or not cut
