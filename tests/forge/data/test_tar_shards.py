"""TarShards: samples out of tar archives by index, in any process; archives that are broken or hostile are refused."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tarfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import forge
from forge.data import tar_headers
from forge.data import tar_shards as shards_module
from forge.data.tar_shards import TarShards

Files = Iterable[tuple[str, bytes]]


def as_bytes(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def member(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def write(path: Path, files: Files, form: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as archive:
        for name, data in files:
            archive.addfile(member(name, len(data)), io.BytesIO(data))
    return path


def raw(path: Path, *pieces: bytes) -> Path:
    """An archive made of blocks, as no honest writer would."""
    path.write_bytes(b"".join(piece + b"\0" * (-len(piece) % 512) for piece in pieces) + b"\0" * 1024)
    return path


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE, **fields: Any) -> bytes:
    return member(name, size, kind, **fields).tobuf(tarfile.GNU_FORMAT)


def numbered(folder: Path, counts: Iterable[int]) -> list[Path]:
    """Shards of numbered samples, each with two files."""
    paths, number = [], 0
    for i, count in enumerate(counts):
        files = []
        for _ in range(count):
            files += [(f"{number:04}.cls", str(number).encode()), (f"{number:04}.txt", b"text %d" % number)]
            number += 1
        paths.append(write(folder / f"s-{i:03}.tar", files))
    return paths


class TestSamples:
    def test_files_of_one_key_are_one_sample_in_order(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "a.tar",
            [("x.jpg", b"\xff"), ("x.cls", b"1"), ("dir/y.seg.png", b"p"), ("x.JSON", b"{}"), ("dir/y.cls", b"")],
        )
        shards = TarShards(path, decode=as_bytes)
        assert [shards[i] for i in range(len(shards))] == [
            {"__key__": "x", "jpg": b"\xff", "cls": b"1", "json": b"{}"},
            {"__key__": "dir/y", "seg.png": b"p", "cls": b""},
        ]

    def test_without_decode_a_few_plain_kinds_are_decoded(self, tmp_path: Path) -> None:
        array = io.BytesIO()
        np.save(array, np.arange(3))
        files = [
            ("a.txt", "größer".encode()),
            ("a.meta.json", b'{"n": [1]}'),
            ("a.cls", b" 7\n"),
            ("a.npy", array.getvalue()),
            ("a.jpg", b"\xff\xd8"),
        ]
        sample = TarShards(write(tmp_path / "a.tar", files))[0]
        assert sample.pop("npy").tolist() == [0, 1, 2]
        assert sample == {"__key__": "a", "txt": "größer", "meta.json": {"n": [1]}, "cls": 7, "jpg": b"\xff\xd8"}

    @pytest.mark.parametrize(
        ("name", "data"),
        [("a.json", b"{"), ("a.cls", b"cat"), ("a.txt", b"\xff"), ("a.npy", b"no"), ("a.json", b"[" * 100_000)],
    )
    def test_undecodable_data_are_named_with_sample_and_shard(self, tmp_path: Path, name: str, data: bytes) -> None:
        kind = name.split(".")[1]
        with pytest.raises(forge.DataError, match=rf"sample 'a' of '.*bad.tar' cannot be decoded: its '{kind}' is no"):
            TarShards(write(tmp_path / "bad.tar", [(name, data)]))[0]

    def test_an_array_that_would_unpickle_is_refused(self, tmp_path: Path) -> None:
        class Harm:
            def __reduce__(self) -> Any:
                return (os.mkdir, (str(tmp_path / "harmed"),))

        array = io.BytesIO()
        np.save(array, np.array([Harm()], dtype=object), allow_pickle=True)
        with pytest.raises(forge.DataError, match="its 'npy' is no npy"):
            TarShards(write(tmp_path / "a.tar", [("a.npy", array.getvalue())]))[0]
        assert not (tmp_path / "harmed").exists()

    def test_a_decode_that_fails_keeps_its_error_and_gets_a_note(self, tmp_path: Path) -> None:
        def decode(sample: dict[str, Any]) -> Any:
            return sample["png"]

        with pytest.raises(KeyError, match="png") as caught:
            TarShards(write(tmp_path / "a.tar", [("k.jpg", b"")]), decode=decode)[0]
        assert "sample 'k' of" in caught.value.__notes__[0]

    def test_indices_work_as_in_a_list(self, tmp_path: Path) -> None:
        shards = TarShards(numbered(tmp_path, [2, 3]))
        assert [sample["cls"] for sample in shards] == [0, 1, 2, 3, 4]  # pyright: ignore[reportGeneralTypeIssues]
        assert shards[-1]["cls"] == 4
        for outside in (5, -6):
            with pytest.raises(IndexError, match="5 samples"):
                shards[outside]


class TestNames:
    def test_braces_and_wildcards_find_archives_in_order(self, tmp_path: Path) -> None:
        paths = [str(path) for path in numbered(tmp_path, [1] * 12)]
        assert TarShards(f"{tmp_path}/s-{{000..011}}.tar").shards == paths
        assert TarShards(f"{tmp_path}/s-*.tar").shards == paths
        assert TarShards(f"{tmp_path}/s-0{{00,11}}.tar").shards == [paths[0], paths[11]]
        assert TarShards(f"{tmp_path}/s-0{{0..1}}{{1..1}}.tar").shards == [paths[1], paths[11]]
        assert TarShards([tmp_path / "s-003.tar", f"{tmp_path}/s-00[12].tar"]).shards == [paths[3], *paths[1:3]]

    @pytest.mark.parametrize(
        ("pattern", "says"),
        [
            ("gone.tar", "no archive 'gone.tar'"),
            ("gone-{0..1}.tar", "no archive 'gone-0.tar'"),
            ("*.tar", r"no archive '\*.tar'"),
            (".", "no archive '.'"),
            ("s-{3..1}.tar", "neither a range"),
            ("s-{x}.tar", "neither a range"),
            ([], "empty list"),
        ],
    )
    def test_what_is_not_there_is_refused_by_name(self, pattern: Any, says: str) -> None:
        with pytest.raises(forge.DataError, match=says):
            TarShards(pattern)


class TestShuffling:
    @given(
        counts=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(sum),
        block=st.integers(1, 12),
        seed=st.integers(-3, 2**40),
        epoch=st.integers(0, 9),
    )
    def test_order_is_every_sample_once_shard_by_shard(
        self, counts: list[int], block: int, seed: int, epoch: int, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        shards = TarShards(numbered(tmp_path_factory.mktemp("shards"), counts), shuffle_block=block)
        torch_state = torch.get_rng_state()
        order = shards.shuffled(seed, epoch)
        assert order.dtype == torch.int64
        assert torch.equal(order, shards.shuffled(seed, epoch))
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert sorted(order.tolist()) == list(range(sum(counts)))
        blocks = [(int(shard), int(i - np.searchsorted(shards.index.shard, shard)) // block)
                  for i, shard in zip(order.tolist(), shards.index.shard[order.numpy()], strict=True)]  # fmt: skip
        entered = [key for place, key in enumerate(blocks) if place == 0 or blocks[place - 1] != key]
        assert len(entered) == len(set(entered))  # a block is never left and entered again
        for shard in {shard for shard, _ in entered}:
            inside = [b for s, b in entered if s == shard]
            assert inside == sorted(inside)
        left = [key[0] for place, key in enumerate(entered) if place == 0 or entered[place - 1][0] != key[0]]
        assert len(left) == len(set(left))

    def test_shards_blocks_epochs_and_seeds_are_really_shuffled(self, tmp_path: Path) -> None:
        shards = TarShards(numbered(tmp_path, [20] * 6), shuffle_block=10)
        orders = {tuple(shards.shuffled(seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
        assert len(orders) == 9
        assert len({tuple(i // 20 for i in order[::20]) for order in orders}) == 9


class TestProcesses:
    @pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
    def test_workers_read_the_same_whatever_was_open_before(self, tmp_path: Path, context: str) -> None:
        shards = TarShards(numbered(tmp_path, [5, 5]), decode=as_bytes)
        here = [shards[i] for i in range(10)]
        workers = DataLoader(shards, batch_size=None, num_workers=2, multiprocessing_context=context)
        assert list(workers) == here

    def test_pickled_it_keeps_its_index_and_no_open_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shards = TarShards(numbered(tmp_path, [3]))
        expected = shards[1]
        copied = pickle.loads(pickle.dumps(shards))
        monkeypatch.setattr(tar_headers, "_members", lambda *path: pytest.fail("read the headers again"))
        assert copied[1] == expected

    def test_headers_are_read_at_the_first_use_and_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[str] = []
        original = tar_headers._members
        monkeypatch.setattr(
            tar_headers, "_members", lambda path, opened: (read.append(path), original(path, opened))[1]
        )
        shards = TarShards(numbered(tmp_path, [2, 2]))
        assert read == []
        assert len(shards) == 4
        assert (shards[3]["cls"], len(shards.shuffled(0, 0)), len(shards)) == (3, 4, 4)
        assert read == shards.shards

    def test_only_so_many_archives_are_open_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shards_module, "_OPEN_AT_ONCE", 3)

        def opened() -> int:
            links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
            return sum(os.readlink(link).startswith(str(tmp_path)) for link in links if link.is_symlink())

        shards = TarShards(numbered(tmp_path, [1] * 8))
        assert [shards[i]["cls"] for i in (*range(8), 0, 7, 0)] == [*range(8), 0, 7, 0]
        assert opened() == 3
        del shards
        assert opened() == 0

    def test_headers_are_read_without_reading_the_data(self, tmp_path: Path) -> None:
        path = tmp_path / "large.tar"
        size = 3 * 2**30
        with path.open("wb") as file:  # sparse: it takes no room
            file.write(header("a.bin", size))
            file.seek(512 + size)
            file.write(header("b.txt", 2) + b"hi".ljust(512, b"\0") + b"\0" * 1024)
        shards = TarShards(path)
        assert (len(shards), shards[1]["txt"]) == (2, "hi")


class TestArchives:
    @pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    def test_every_format_of_names_is_read(self, tmp_path: Path, form: int) -> None:
        name = "/".join(["d" * 60] * 3) + "/größe.txt" if form == tarfile.USTAR_FORMAT else "ö" * 200 + "/k.txt"
        files = [(name, b"first"), ("short.txt", b"second")]
        shards = TarShards(write(tmp_path / "a.tar", files, form))
        assert [(s["__key__"], s["txt"]) for s in (shards[0], shards[1])] == [
            (name.removesuffix(".txt"), "first"),
            ("short", "second"),
        ]

    def test_hidden_files_and_directories_are_passed_over(self, tmp_path: Path) -> None:
        path = tmp_path / "a.tar"
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "all of it"}) as archive:
            archive.addfile(member("folder.d", kind=tarfile.DIRTYPE))
            for name in ("README", "folder.d/.DS_Store", "folder.d/a.txt"):
                archive.addfile(member(name, 1), io.BytesIO(b"x"))
        shards = TarShards(path)
        assert [sample["__key__"] for sample in shards] == ["folder.d/a"]  # pyright: ignore[reportGeneralTypeIssues]

    @pytest.mark.parametrize("name", ["/etc/passwd.txt", "../../up.txt", "./a.txt", "a/../../b.txt"])
    def test_names_are_keys_and_never_paths(self, tmp_path: Path, name: str) -> None:
        before = sorted(tmp_path.rglob("*"))
        path = write(tmp_path / "a.tar", [(name, b"x")])
        assert TarShards(path)[0] == {"__key__": name.removesuffix(".txt"), "txt": "x"}
        assert sorted(tmp_path.rglob("*")) == [*before, path]

    @pytest.mark.parametrize(
        "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.GNUTYPE_SPARSE, b"Z"]
    )
    def test_links_devices_and_sparse_files_are_refused_by_name(self, tmp_path: Path, kind: bytes) -> None:
        path = raw(tmp_path / "bad.tar", header("l.txt", 0, kind, linkname="/etc/passwd"))
        with pytest.raises(forge.DataError, match=r"in '.*bad.tar' the member 'l.txt' is a link.*--dereference"):
            len(TarShards(path))

    def test_a_file_that_is_there_twice_is_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path / "bad.tar", [("a.txt", b"1"), ("b.txt", b"2"), ("a.TXT", b"3")])
        with pytest.raises(forge.DataError, match=r"in '.*bad.tar' the member 'a.TXT' occurs twice"):
            len(TarShards(path))

    @pytest.mark.parametrize("cut", [1, 400, 512, 700, 1024, 1536, 2048])
    def test_an_archive_cut_short_anywhere_is_refused(self, tmp_path: Path, cut: int) -> None:
        whole = write(tmp_path / "a.tar", [("a.txt", b"x" * 600), ("b.txt", b"y")]).read_bytes()
        path = tmp_path / "bad.tar"
        path.write_bytes(whole[:cut])
        with pytest.raises(forge.DataError, match=r"bad.tar' (is cut short|the member '[ab].txt' should have)"):
            len(TarShards(path))

    @pytest.mark.parametrize("size", [10_000, 2**40, -1, -512, -1024])
    def test_a_size_that_cannot_be_is_refused(self, tmp_path: Path, size: int) -> None:
        info = header("a.txt", 0)
        number = size.to_bytes(12, "big", signed=True) if size < 0 else b"\x80" + size.to_bytes(11, "big")
        path = raw(tmp_path / "bad.tar", with_checksum(info[:124] + number + info[136:]), b"data")
        with pytest.raises(forge.DataError, match=rf"member 'a.txt' should have {size} bytes"):
            len(TarShards(path))

    @pytest.mark.parametrize("data", [b"", b"not a tar at all" * 100, b"\0" * 100, b"\1" * 2048])
    def test_what_is_no_archive_is_refused(self, tmp_path: Path, data: bytes) -> None:
        (tmp_path / "bad.tar").write_bytes(data)
        with pytest.raises(forge.DataError, match=r"bad.tar' (is no tar archive|is cut short)"):
            len(TarShards(tmp_path / "bad.tar"))

    def test_compressed_archives_are_refused_with_the_command(self, tmp_path: Path) -> None:
        plain = write(tmp_path / "a.tar", [("a.txt", b"")])
        (tmp_path / "a.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
        with pytest.raises(forge.DataError, match=r"a.tar.gz' is compressed.*gunzip .*a.tar.gz"):
            len(TarShards(tmp_path / "a.tar.gz"))

    def test_archives_without_a_sample_are_refused(self, tmp_path: Path) -> None:
        empty, full = write(tmp_path / "empty.tar", []), write(tmp_path / "full.tar", [("a.txt", b"")])
        assert len(TarShards([empty, full])) == 1
        with pytest.raises(forge.DataError, match=r"no file named key.ext in '.*empty.tar'"):
            len(TarShards(empty))

    def test_an_archive_that_changes_after_it_was_indexed_is_refused(self, tmp_path: Path) -> None:
        (path,) = numbered(tmp_path, [2])
        shards = TarShards(path)
        assert len(shards) == 2
        os.truncate(path, 600)
        with pytest.raises(forge.DataError, match="changed its size since it was indexed"):
            shards[1]

    @given(data=st.data())
    def test_any_damage_is_an_error_of_ours_or_changes_only_bytes(
        self, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("mutated")
        name = "n" * 150 + ".txt"
        whole = bytearray(
            write(folder / "a.tar", [(name, b"x" * 700), ("b.cls", b"1")], tarfile.PAX_FORMAT).read_bytes()
        )
        for _ in range(data.draw(st.integers(1, 4))):
            whole[data.draw(st.integers(0, 4500))] = data.draw(st.integers(0, 255))
        (folder / "m.tar").write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
        shards = TarShards(folder / "m.tar", decode=as_bytes)
        with suppress(forge.DataError):  # any other error, and any sample that is not bytes, fails the test
            for sample in (shards[i] for i in range(len(shards))):
                assert all(isinstance(value, (bytes, str)) for value in sample.values())


def with_checksum(block: bytes) -> bytes:
    blank = block[:148] + b" " * 8 + block[156:]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]
