"""Checkpoints of several ranks: errors while writing, damage and malice, the command line."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch import distributed as dist

from forge.checkpoint import (
    BackgroundWriter,
    Checkpoints,
    StoredCheckpoint,
    Writers,
    directory,
    manifest,
    publish,
    publish_sharded,
    tensors,
    write_sharded,
)
from forge.errors import CheckpointError
from tests.forge.checkpoint.test_checkpoint import tree_of as plain_tree
from tests.forge.checkpoint.test_hostile import check_refused, header, sign_text
from tests.forge.checkpoint.test_tree import same
from tests.forge.cli.test_ckpt import call  # noqa: F401 (a fixture)
from tests.support.ranks import in_threads
from tests.support.sharded_kit import MANIFESTS, write_in_threads

# -- errors while writing ---------------------------------------------------------------------------------------------


def all_errors(world: int, function: Callable[[int], Any]) -> list[str]:
    """What each rank raised."""

    def caught(rank: int) -> str:
        with pytest.raises(CheckpointError) as error:
            function(rank)
        return str(error.value)

    return in_threads(world, caught)


@pytest.mark.parametrize("victim", ["model-00001", "state-00003", "state.json", "manifest"])
def test_a_disk_that_is_full_for_one_rank_is_one_error_on_all(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    writers = [BackgroundWriter(Writers(rank, 3, store)) for rank in range(3)]
    real, called = publish.write_file, []

    def full(path: Path, pieces: Any) -> Any:
        if path.name.startswith(victim):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, pieces)

    def save(rank: int) -> None:
        writers[rank].submit(tmp_path / "update-00000002", plain_tree(2), lambda: called.append(rank))
        writers[rank].wait()

    with monkeypatch.context() as patch:
        patch.setattr(publish, "write_file", full)
        first, *others = all_errors(3, save)
    assert others == [first] * 2
    number = 2 if victim == "state-00003" else 0
    assert f"update-00000002 could not be written: rank {number} on " in first
    assert "No space left on device" in first
    assert not list(tmp_path.iterdir())
    assert not called
    in_threads(3, save)  # the next one is none the worse
    assert called == [0]
    assert same(StoredCheckpoint(tmp_path / "update-00000002").load(), plain_tree(2))
    assert {key for key in store.list_keys() if "begun" not in key} == set()


def test_a_state_one_rank_cannot_split_is_an_error_on_all(tmp_path: Path) -> None:
    for victim in (0, 1):
        store = dist.HashStore()

        def save(rank: int, store: Any = store, victim: int = victim) -> None:
            tree = {"a": object() if rank == victim else 1}
            writer = BackgroundWriter(Writers(rank, 2, store))
            writer.submit(tmp_path / "it", tree)
            writer.close()

        errors = all_errors(2, save)
        assert all("a is a object, which a checkpoint cannot hold" in error for error in errors)
        assert not list(tmp_path.iterdir())
        assert all("begun" in key for key in store.list_keys())


def test_ranks_with_different_state_are_refused(tmp_path: Path) -> None:
    store = dist.HashStore()
    errors = all_errors(
        2, lambda rank: write_sharded(tmp_path / "it", {"a": torch.ones(3 + rank)}, Writers(rank, 2, store))
    )
    assert errors[0] == errors[1]
    assert "rank 1 has tensors of other names, shapes or placements than rank 0" in errors[0]
    assert not list(tmp_path.iterdir())


def test_a_run_folder_that_is_not_shared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_sharded, "IN_SIGHT", 0.0)
    store = dist.HashStore()
    folders = [tmp_path / "here", tmp_path / "there"]
    errors = all_errors(2, lambda rank: write_sharded(folders[rank] / "it", plain_tree(1), Writers(rank, 2, store)))
    assert errors[0] == errors[1]
    assert "rank 1 on " in errors[0]
    assert "The run folder must be on a file system that all hosts share" in errors[0]
    assert not list((tmp_path / "here").iterdir())


def test_an_error_of_then_is_told_to_all(tmp_path: Path) -> None:
    store = dist.HashStore()

    def save(rank: int) -> None:
        def failing() -> None:
            raise KeyError("pruning")

        writer = BackgroundWriter(Writers(rank, 2, store))
        writer.submit(tmp_path / "it", plain_tree(1), failing if rank == 0 else None)
        writer.close()

    assert all("pruning" in error for error in all_errors(2, save))
    assert same(StoredCheckpoint(tmp_path / "it").load(), plain_tree(1))


# -- damage and malice ------------------------------------------------------------------------------------------------


def forged(folder: Path, document: Any, *ranks: dict[str, Tensor] | bytes, world: int | None = None) -> Path:
    """A directory with any document and any state files, and a manifest that is right about them."""
    folder.mkdir(exist_ok=True)
    names = manifest.files_of(world or len(ranks))
    content = dict(zip(names[-len(ranks) :], ranks, strict=True))
    records = {}
    for name in names:
        given = content.get(name, {})
        data = given if isinstance(given, bytes) else b"".join(tensors.encode(given, name))
        if name == manifest.DOCUMENT:
            data = document if isinstance(document, bytes) else json.dumps(document).encode()
        (folder / name).write_bytes(data)
        records[name] = manifest.FileRecord(len(data), hashlib.sha256(data).hexdigest())
    (folder / manifest.NAME).write_bytes(manifest.encode(records))
    return folder


ONES, ZEROS = torch.ones(2, 3), torch.zeros(2, 3)
MARKER = {"a": {"$state": ["w", None, [4, 3]]}}


def test_what_is_well_made_by_hand_loads(tmp_path: Path) -> None:
    folder = forged(tmp_path / "update-00000001", MARKER, {"w@0,0": ONES}, {"w@2,0": ZEROS})
    assert same(StoredCheckpoint(folder).load(), {"a": torch.cat([ONES, ZEROS])})


HOSTILE: dict[str, tuple[Any, list[dict[str, Tensor]]]] = {
    "a gap": (MARKER, [{"w@0,0": ONES}, {"w@3,0": ZEROS[:1]}]),
    "a piece missing": (MARKER, [{"w@0,0": ONES}, {}]),
    "an overlap": (MARKER, [{"w@0,0": ONES}, {"w@1,0": ZEROS}]),
    "an overlap that hides a gap": (MARKER, [{"w@0,0": ONES}, {"w@0,1": ZEROS}]),
    "the same piece twice": (MARKER, [{"w@0,0": torch.ones(4, 3)}, {"w@0,0": torch.ones(4, 3)}]),
    "a piece too many": (MARKER, [{"w@0,0": ONES, "w@4,0": ONES}, {"w@2,0": ZEROS}]),
    "a piece beyond": (MARKER, [{"w@0,0": ONES}, {"w@2,1": ZEROS}]),
    "far beyond": (MARKER, [{"w@0,0": ONES}, {"w@9000000000000000000,0": ZEROS}]),
    "an empty piece": (MARKER, [{"w@0,0": ONES, "w@4,0": torch.ones(0, 3)}, {"w@2,0": ZEROS}]),
    "another dtype": (MARKER, [{"w@0,0": ONES}, {"w@2,0": ZEROS.double()}]),
    "fewer dimensions": (MARKER, [{"w@0,0": ONES}, {"w@2": torch.zeros(2)}]),
    "more places than dimensions": (MARKER, [{"w@0,0": ONES}, {"w@2,0,0": ZEROS}]),
    "another shape": ({"a": {"$state": ["w", None, [2, 6]]}}, [{"w@0,0": ONES}, {"w@2,0": ZEROS}]),
    "two shapes": (
        {**MARKER, "b": {"$state": ["w", None, [3, 4]]}},
        [{"w@0,0": ONES}, {"w@2,0": ZEROS}],
    ),
    "no shape": ({"a": {"$state": "w"}}, [{"w@0,0": ONES}, {"w@2,0": ZEROS}]),
    "no dimensions": ({"a": {"$state": ["w", None, []]}}, [{"w@0": torch.ones(())}, {}]),
    "a negative size": ({"a": {"$state": ["w", None, [-4, 3]]}}, [{"w@0,0": ONES}, {"w@2,0": ZEROS}]),
    "a huge size": ({"a": {"$state": ["w", None, [2**70, 3]]}}, [{"w@0,0": ONES}, {"w@2,0": ZEROS}]),
    "a size of zero": ({"a": {"$state": ["w", None, [0, 3]]}}, [{"w@0,0": ONES}, {"w@2,0": ZEROS}]),
    "sizes as text": ({"a": {"$state": ["w", None, "43"]}}, [{"w@0,0": ONES}, {"w@2,0": ZEROS}]),
    "many dimensions": ({"a": {"$state": ["w", None, [1] * 10_000]}}, [{"w@0,0": ONES}, {"w@2,0": ZEROS}]),
    "a note that does not fit": ({"a": {"$state": ["w", "complex64", [4, 3]]}}, [{"w@0,0": ONES}, {"w@2,0": ZEROS}]),
    "a note of another kind": ({"a": {"$state": ["w", 1, [4, 3]]}}, [{"w@0,0": ONES}, {"w@2,0": ZEROS}]),
    "four fields": ({"a": {"$state": ["w", None, [4, 3], 0]}}, [{"w@0,0": ONES}, {"w@2,0": ZEROS}]),
    "a tuple of fields": (
        {"a": {"$state": {"$tuple": ["w", None, [4, 3]]}}},
        [{"w@0,0": ONES}, {"w@2,0": ZEROS}],
    ),
    "a whole tensor in place of pieces": (MARKER, [{"w": torch.ones(4, 3)}, {}]),
    "a whole tensor beside pieces": (MARKER, [{"w@0,0": ONES, "w": ONES}, {"w@2,0": ZEROS}]),
    "a whole tensor twice": ({"a": {"$state": "w"}}, [{"w": ONES}, {"w": ONES}]),
    "pieces that nobody mentions": ({"a": 1}, [{"w@0,0": ONES}, {"w@2,0": ZEROS}]),
    "cut along many dimensions": (
        {"a": {"$state": ["w", None, [2] * 20]}},
        [{f"w@{','.join('0' * 20)}": torch.ones([1] * 20)}, {f"w@{','.join('1' * 20)}": torch.ones([1] * 20)}],
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_pieces_that_do_not_make_up_the_tensor_are_refused(case: str, tmp_path: Path) -> None:
    document, ranks = HOSTILE[case]
    check_refused(forged(tmp_path / "update-00000001", document, *ranks), "update-00000001")


def test_one_process_has_no_pieces(tmp_path: Path) -> None:
    check_refused(forged(tmp_path / "update-00000001", MARKER, {"w@0,0": torch.ones(4, 3)}, world=1))


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_forged_manifest_is_refused(case: str, tmp_path: Path) -> None:
    write_in_threads(tmp_path / "update-00000001", plain_tree(1), world=3)
    content = json.loads((tmp_path / "update-00000001" / manifest.NAME).read_bytes())
    del content["sha256"]
    MANIFESTS[case](content)
    (tmp_path / "update-00000001" / manifest.NAME).write_bytes(sign_text(content))
    check_refused(tmp_path / "update-00000001", "manifest")


@pytest.mark.slow
def test_thousands_of_ranks_fit_into_a_manifest() -> None:
    def made(world: int) -> bytes:
        return manifest.encode({name: manifest.FileRecord(2**61, "0" * 64) for name in manifest.files_of(world)})

    data = made(manifest.MAX_RANKS)
    assert len(data) <= manifest.MAX_SIZE
    assert len(manifest.decode(data, "it")) == 2 * manifest.MAX_RANKS + 1
    with pytest.raises(CheckpointError, match="it "):
        manifest.decode(made(manifest.MAX_RANKS + 1), "it")


@pytest.mark.parametrize("data", [header(b"[" * 1000), header({"a": {"b": 1}}), b"", header({}, b"x")], ids=range(4))
def test_a_hostile_header_in_any_ranks_file_is_refused(data: bytes, tmp_path: Path) -> None:
    for ranks in ([data, {"w": ONES}], [{"w": ONES}, data]):
        check_refused(forged(tmp_path / "update-00000001", {"a": {"$state": "w"}}, *ranks), "safetensors")


def test_more_files_than_may_be_open_are_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_in_threads(tmp_path / "update-00000001", plain_tree(1), world=6)
    monkeypatch.setattr(directory, "MOST_OPEN", 2)
    assert same(StoredCheckpoint(tmp_path / "update-00000001").load(), plain_tree(1))
    victim = tmp_path / "update-00000001" / "model-00001-of-00006.safetensors"
    real = tensors.read_header

    def exchanged(*arguments: Any) -> Any:
        data = victim.read_bytes()
        victim.unlink()
        victim.write_bytes(data)
        return real(*arguments)

    monkeypatch.setattr(tensors, "read_header", exchanged)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        StoredCheckpoint(tmp_path / "update-00000001").load()


# -- the command line -------------------------------------------------------------------------------------------------


def test_forge_ckpt_reads_what_several_ranks_wrote(call: Any, tmp_path: Path) -> None:  # noqa: F811
    from forge.testing import fit_tiny
    from forge_plugins import Checkpoint as Saves

    fit_tiny([Saves()], run_dir=tmp_path / "run")
    one = Checkpoints(tmp_path / "run" / "checkpoints").all()[-1]
    tree, store = StoredCheckpoint(one).load(), dist.HashStore()
    several = tmp_path / "several" / "checkpoints" / one.name
    in_threads(3, lambda rank: write_sharded(several, tree, Writers(rank, 3, store)))
    assert call("verify", tmp_path / "several")[0] == 0
    assert "net.0.weight" in call("show", several)[1]
    assert call("diff", one, several)[0] == 0
    assert call("export", several, tmp_path / "weights.safetensors")[0] == 0
    assert same(load_file(tmp_path / "weights.safetensors"), load_file(tmp_path / "run" / "weights.safetensors"))
    (several / "model-00002-of-00003.safetensors").unlink()
    code, out = call("verify", tmp_path / "several")
    assert code == 1
    assert any("model-00002" in line and "is incomplete" in line for line in out.splitlines())
    (several / manifest.NAME).unlink()
    code, out = call("verify", tmp_path / "several")
    assert code == 1
    assert any("it has no manifest.json" in line for line in out.splitlines())
