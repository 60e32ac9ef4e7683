"""Checkpoints that several ranks write together: complete, checked, the same on any number of ranks, never torn."""

from __future__ import annotations

import itertools
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, _StridedShard

import forge.checkpoint.tensors
from forge.checkpoint import (
    StoredCheckpoint,
    Writers,
    check_savable,
    manifest,
    placed_like,
    tensors,
    write_checkpoint,
)
from forge.checkpoint.readers import Readers
from forge.checkpoint.slices import TensorSlice, cover, parse_piece_name, piece_name
from forge.checkpoint.tree import split
from forge.errors import CheckpointError
from tests.conftest import PROFILE
from tests.forge.checkpoint.test_checkpoint import tree_of as plain_tree
from tests.forge.checkpoint.test_tree import same, tensor_of
from tests.support.patience import PATIENCE
from tests.support.ranks import in_threads, pretending
from tests.support.sharded_kit import S0, S1, R, write_pretended

# -- boxes ------------------------------------------------------------------------------------------------------------


def counted(shape: tuple[int, ...], boxes: list[TensorSlice]) -> bool:
    """Whether each entry is in one box, by counting."""
    count = torch.zeros([2 * size for size in shape], dtype=torch.int)
    for box in boxes:
        count[box.as_index] += 1
    inside = count[tuple(slice(size) for size in shape)]
    return bool((inside == 1).all()) and int(count.sum()) == math.prod(shape)


@given(st.data())
def test_boxes_cover_a_tensor_exactly_or_not(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    cells = itertools.product(*(itertools.pairwise(edges) for edges in cuts))
    boxes = [TensorSlice(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]
    assert cover(shape, boxes)
    how = data.draw(st.sampled_from(["drop", "double", "move", "grow", "leave"]))
    chosen = data.draw(st.integers(0, len(boxes) - 1))
    dimension = data.draw(st.integers(0, len(shape) - 1))
    one = tuple(int(d == dimension) for d in range(len(shape)))
    begin, size = boxes[chosen]
    if how == "drop":
        del boxes[chosen]
    elif how == "double":
        boxes.append(boxes[chosen])
    elif how == "move":
        boxes[chosen] = TensorSlice(tuple(a + b for a, b in zip(begin, one, strict=True)), size)
    elif how == "grow":
        boxes[chosen] = TensorSlice(begin, tuple(a + b for a, b in zip(size, one, strict=True)))
    assert cover(shape, boxes) == counted(shape, boxes) == (how == "leave")


def test_a_piece_is_named_by_its_tensor_and_where_it_begins() -> None:
    assert piece_name("a@b.w", TensorSlice((0, 12), (3, 4))) == "a@b.w@0,12"
    assert parse_piece_name("a@b.w@0,12") == ("a@b.w", (0, 12))
    assert [parse_piece_name(text) for text in ("w", "w@", "w@01", "w@-1", "w@1,", "@1", "w@1.5")] == [None] * 7


# -- pretended ranks --------------------------------------------------------------------------------------------------


LAYOUTS: list[tuple[tuple[int, ...], list[Any]]] = [
    ((2,), [S0]),
    ((3,), [S1]),
    ((4,), [R]),
    ((8,), [S0]),
    ((2, 2), [R, S0]),
    ((2, 2), [S0, R]),
    ((2, 2), [S0, S1]),
    ((2, 2), [S0, S0]),
    ((2, 2), [S1, S0]),
    ((2, 2), [_StridedShard(0, split_factor=2), S0]),
    ((2, 2), [_StridedShard(0, split_factor=2), R]),
    ((3, 2), [_StridedShard(1, split_factor=2), S1]),
    ((1, 2), [S0, S1]),
]
OTHERS = [*LAYOUTS[:2], *LAYOUTS[6:11]] if PROFILE == "full" else [LAYOUTS[1], LAYOUTS[10]]
"""Into which others are loaded; of the last, a rank's shard lies in several places of the tensor."""


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS, ids=[f"{mesh} {places}" for mesh, places in LAYOUTS])
def test_every_placement_comes_back_whole_and_into_every_other(
    mesh: tuple[int, ...], placements: list[Any], tmp_path: Path
) -> None:
    full = {f"{a}x{b}": torch.randn(a, b) for a, b in [(8, 6), (5, 3), (1, 1), (7, 7), (0, 3), (3, 2)]}
    full |= {str(dtype): tensor_of(dtype, (5, 4)) for dtype in (torch.bfloat16, torch.complex64, torch.float8_e8m0fnu)}
    world = math.prod(mesh)

    def make() -> dict[str, Any]:
        there = init_device_mesh("cpu", mesh)
        spread = {
            name: distribute_tensor(tensor, there, placements, src_data_rank=None) for name, tensor in full.items()
        }
        return {"model": spread, "more": [torch.arange(9), {"step": torch.tensor(3.0)}]}

    shares = write_pretended(tmp_path / "it", world, make)
    expected = {"model": full, "more": [torch.arange(9), {"step": torch.tensor(3.0)}]}
    assert same(StoredCheckpoint(tmp_path / "it").load(), expected)
    written = sum(t.nbytes for share in shares for t in (*share.model.values(), *share.state.values()))
    assert written == sum(t.nbytes for t in (*full.values(), torch.arange(9), torch.tensor(3.0)))
    for other, places in OTHERS:
        for rank in range(math.prod(other)):
            with pretending(rank, math.prod(other)):
                there = init_device_mesh("cpu", other)
                live = {name: distribute_tensor(t, there, places, src_data_rank=None) for name, t in full.items()}
                loaded = StoredCheckpoint(tmp_path / "it").load(place=placed_like(live))
                for name, tensor in live.items():
                    got = loaded["model"][name]
                    assert isinstance(got, DTensor)
                    assert (got.shape, got.placements, got.device_mesh) == (full[name].shape, tensor.placements, there)
                    assert same(got.to_local(), tensor.to_local().contiguous()), (name, rank)
                assert same(loaded["more"], expected["more"])


def bytes_read() -> int:
    """The bytes that this process has read from files, by the kernel's count."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count the bytes that are read")
def test_each_rank_reads_its_shards_and_hashes_its_share(tmp_path: Path) -> None:
    full = {f"{number}": torch.randn(64, 1024) for number in range(4)}
    size, most = sum(tensor.nbytes for tensor in full.values()), {}
    for world in (2, 4, 8):

        def spread(world: int = world) -> dict[str, Any]:
            there = init_device_mesh("cpu", (world,))
            return {"model": {n: distribute_tensor(t, there, [S0], src_data_rank=None) for n, t in full.items()}}

        write_pretended(tmp_path / f"{world}", world, spread)
        reads = []
        for rank in range(world):
            with pretending(rank, world):
                live, before = spread()["model"], bytes_read()
                stored = StoredCheckpoint(tmp_path / f"{world}")
                loaded = stored.load(place=placed_like(live), readers=Readers(rank, world))["model"]
                reads.append(bytes_read() - before)
                assert all(same(loaded[n].to_local(), live[n].to_local().contiguous()) for n in full)
        most[world] = max(reads) / size
    assert all(share <= 2.1 / world for world, share in most.items()), most  # once to hash, once to load


def test_damage_that_one_reader_finds_is_raised_by_all(tmp_path: Path) -> None:
    tree = {"model": {f"{i}": torch.full((100,), i, dtype=torch.uint8) for i in range(8)}}
    write_pretended(tmp_path / "it", 4, lambda: tree)
    damaged = tmp_path / "it" / "model-00003-of-00004.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    meeting, said = threading.Barrier(4), [None] * 4
    errors: list[str] = [""] * 4

    def read(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            said[rank] = value
            meeting.wait(PATIENCE)
            return list(said)

        with pytest.raises(CheckpointError) as caught:
            StoredCheckpoint(tmp_path / "it").verify(Readers(rank, 4, gather))
        errors[rank] = str(caught.value)

    in_threads(4, read)
    assert errors == [f"{damaged} is damaged: its sha256 differs from the manifest."] * 4


def test_whole_tensors_are_dealt_out_by_size(tmp_path: Path) -> None:
    sizes = [1000, 900, 800, 700, 300, 200, 100, *[1] * 40]
    tree = {"model": {f"{i}": torch.full((size,), i, dtype=torch.uint8) for i, size in enumerate(sizes)}}
    shares = write_pretended(tmp_path / "it", 4, lambda: tree)
    loads = [sum(t.nbytes for t in share.model.values()) for share in shares]
    assert max(loads) - min(loads) <= 100
    assert sum(loads) == sum(sizes)
    assert same(StoredCheckpoint(tmp_path / "it").load(), tree)
    names = {"manifest.json", "state.json"}
    names |= {f"{kind}-0000{n}-of-00004.safetensors" for kind in ("model", "state") for n in (1, 2, 3, 4)}
    assert {path.name for path in (tmp_path / "it").iterdir()} == names
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "it").iterdir()} == {0o600}
    whole = [load_file(path) for path in (tmp_path / "it").glob("model-*")]  # any reader can open them
    assert same({name: t for part in whole for name, t in sorted(part.items())}.keys() ^ tree["model"].keys(), set())


def test_ranks_that_hold_the_same_shard_share_the_work() -> None:
    weights = [torch.zeros(64, 8) if i % 2 else torch.zeros(64) for i in range(12)]  # every other one is small

    def shares(mesh: tuple[int, ...], placements: list[Any]) -> list[int]:
        found = []
        for rank in range(4):
            with pretending(rank, 4):
                there = init_device_mesh("cpu", mesh)
                spread = [distribute_tensor(t, there, placements, src_data_rank=None) for t in weights]
                found.append(
                    sum(t.nbytes for t in split({"a": spread}, Writers(rank, 4, dist.HashStore())).state.values())
                )
        return found

    total = sum(t.nbytes for t in weights)
    for loads in (shares((2, 2), [R, S0]), shares((4,), [R]), shares((4,), [S0])):
        assert sum(loads) == total
        assert max(loads) - min(loads) <= max(t.nbytes for t in weights)


def test_of_meshes_that_hold_the_same_only_the_first_writes(tmp_path: Path) -> None:
    full = torch.randn(6, 3)

    def make() -> dict[str, Any]:
        inner = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["tensor"]
        return {"model": {"w": distribute_tensor(full, inner, [S0], src_data_rank=None)}}

    shares = write_pretended(tmp_path / "it", 4, make)
    assert [list(share.model) for share in shares] == [["w@0,0"], ["w@3,0"], [], []]
    assert same(StoredCheckpoint(tmp_path / "it").load(), {"model": {"w": full}})


def test_tied_shards_are_written_once_and_tied_again(tmp_path: Path) -> None:
    full = torch.randn(1, 4)

    def make() -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2,))
        ours, other = full[dist.get_rank() :].clone(), full[dist.get_rank() :].clone()
        options: dict[str, Any] = {"shape": full.shape, "stride": full.stride()}
        weights = {"a": ours, "b": ours, "c": other}
        return {"model": {name: DTensor.from_local(local, mesh, [S0], **options) for name, local in weights.items()}}

    shares = write_pretended(tmp_path / "it", 2, make)
    assert [list(share.model) for share in shares] == [["a@0,0", "c@0,0"], []]
    loaded = StoredCheckpoint(tmp_path / "it").load()["model"]
    assert loaded["a"] is loaded["b"]
    assert loaded["a"] is not loaded["c"]


def test_names_that_read_like_pieces_are_kept_apart(tmp_path: Path) -> None:
    full = torch.randn(4, 2)

    def make() -> dict[str, Any]:
        spread = distribute_tensor(full, init_device_mesh("cpu", (2,)), [S0], src_data_rank=None)
        return {"model": {"w": spread, "w@0,0": torch.ones(1), "w@2,0": torch.zeros(2)}}

    write_pretended(tmp_path / "it", 2, make)
    expected = {"model": {"w": full, "w@0,0": torch.ones(1), "w@2,0": torch.zeros(2)}}
    assert same(StoredCheckpoint(tmp_path / "it").load(), expected)
    write_checkpoint(tmp_path / "one", expected)
    assert set(load_file(tmp_path / "one" / "model.safetensors")) == {"w", "w@0,0", "w@2,0"}


def test_a_mesh_of_one_writes_what_one_process_writes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain", plain_tree(3))
    with pretending(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        tree = plain_tree(3)
        for named in (tree["model"], tree["optimizers"]["state"]["w"]):
            named |= {name: distribute_tensor(tensor, mesh, [S0], src_data_rank=None) for name, tensor in named.items()}
        write_checkpoint(tmp_path / "mesh", tree)
    for name in (manifest.NAME, *manifest.FILES):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "mesh" / name).read_bytes()


def test_a_dtensor_that_cannot_be_saved_is_refused_by_path() -> None:
    with pretending(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(CheckpointError, match=r"a\.b is a DTensor of partial sums"):
            check_savable({"a": {"b": DTensor.from_local(torch.ones(2), mesh, [Partial()])}})
        odd = DTensor.from_local(torch.ones(3), mesh, [S0], shape=torch.Size([9]), stride=(1,))
        with pytest.raises(CheckpointError, match=r"b is a DTensor whose shard is \(3,\); its placements.*\(4,\)"):
            check_savable({"b": odd})
        with pytest.raises(CheckpointError, match="w is sharded over several ranks, which must save it together"):
            split({"w": distribute_tensor(torch.ones(4), mesh, [S0], src_data_rank=None)})


def test_a_slice_reads_only_the_rows_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.arange(40.0).reshape(10, 4)
    write_pretended(
        tmp_path / "it",
        2,
        lambda: {"model": {"w": distribute_tensor(full, init_device_mesh("cpu", (2,)), [S0], src_data_rank=None)}},
    )
    read: list[tuple[str, tuple[int, ...]]] = []
    real = tensors.read_tensors

    def watched(stream: Any, header: Any, what: str) -> Any:
        read.extend((Path(what).name[:11], entry.shape) for entry in header.entries.values())
        return real(stream, header, what)

    monkeypatch.setattr(forge.checkpoint.tensors, "read_tensors", watched)

    def loaded(box: TensorSlice) -> Tensor:
        read.clear()
        return StoredCheckpoint(tmp_path / "it").load(place=lambda path, info, read: read(box))["model"]["w"]

    assert torch.equal(loaded(TensorSlice((6, 0), (2, 4))), full[6:8])
    assert read == [("model-00002", (2, 4))]
    assert torch.equal(loaded(TensorSlice((4, 1), (3, 2))), full[4:7, 1:3])
    assert read == [("model-00001", (1, 4)), ("model-00002", (2, 4))]
    assert StoredCheckpoint(tmp_path / "it").load(place=lambda path, info, read: path)["model"]["w"] == ("model", "w")


def test_a_tensor_is_placed_by_its_name_and_shape_alone(tmp_path: Path) -> None:
    full = {"w": torch.randn(4, 2), "b": torch.randn(4)}
    tree = {
        "model": full,
        "optimizers": {"": {"state": {"w": {"exp_avg": torch.randn(4, 2), "step": torch.tensor(5.0)}}}},
        "plugins": {"ema": {"weights": {"w": torch.randn(4, 2)}}, "odd": {"w": torch.randn(3), "x": torch.randn(4, 2)}},
    }
    write_checkpoint(tmp_path / "it", tree)
    with pretending(1, 2):
        live = {
            "w": distribute_tensor(full["w"], init_device_mesh("cpu", (2,)), [S0], src_data_rank=None),
            "b": full["b"],
        }
        loaded = StoredCheckpoint(tmp_path / "it").load(place=placed_like(live))
        ours = (
            loaded["model"]["w"],
            loaded["optimizers"][""]["state"]["w"]["exp_avg"],
            loaded["plugins"]["ema"]["weights"]["w"],
        )
        assert all(isinstance(tensor, DTensor) and tensor.to_local().shape == (2, 2) for tensor in ours)
        assert torch.equal(ours[1].to_local(), tree["optimizers"][""]["state"]["w"]["exp_avg"][2:])
        assert same(loaded["plugins"]["odd"], tree["plugins"]["odd"])
        assert same(loaded["optimizers"][""]["state"]["w"]["step"], torch.tensor(5.0))
        assert same(loaded["model"]["b"], full["b"])


def test_what_is_tied_is_placed_under_any_of_its_names(tmp_path: Path) -> None:
    full = torch.randn(4, 2)
    write_checkpoint(tmp_path / "it", {"model": {"w": full, "tied": full}})
    with pretending(1, 2):
        live = {"w": distribute_tensor(full, init_device_mesh("cpu", (2,)), [S0], src_data_rank=None)}
        loaded = StoredCheckpoint(tmp_path / "it").load(place=placed_like(live))["model"]
        assert isinstance(loaded["w"], DTensor)
        assert loaded["tied"] is loaded["w"]
