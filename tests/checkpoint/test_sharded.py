"""Checkpoints that several ranks write together: complete, checked, the same on any number of ranks, never torn."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Partial, _StridedShard

import forge.checkpoint.tensors
from forge import load_weights
from forge.checkpoint import (
    BackgroundWriter,
    Checkpoints,
    StoredCheckpoint,
    Writers,
    check_savable,
    directory,
    manifest,
    placed_like,
    publish,
    publish_sharded,
    save_weights,
    tensors,
    write_checkpoint,
    write_sharded,
)
from forge.checkpoint.readers import Readers
from forge.checkpoint.slices import TensorSlice, cover, parse_piece_name, piece_name
from forge.checkpoint.tree import Split, split
from forge.errors import CheckpointError
from tests.checkpoint.test_checkpoint import check_folder, every_kill
from tests.checkpoint.test_checkpoint import tree_of as plain_tree
from tests.checkpoint.test_hostile import check_refused, header, sign_text
from tests.checkpoint.test_tree import ALL_DTYPES, same, tensor_of
from tests.cli.test_ckpt import call  # noqa: F401 (a fixture)
from tests.conftest import PROFILE
from tests.support.ranks import in_threads, launch, pretending

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


def write_pretended(target: Path, world: int, make: Callable[[], dict[str, Any]]) -> list[Split]:
    """Split what `make` gives on each rank, then write it all together; what each rank wrote."""
    store = dist.HashStore()
    all_writers = [Writers(rank, world, store) for rank in range(world)]
    shares = []
    for writers in all_writers:
        with pretending(writers.rank, world):
            check_savable(make())
            shares.append(split(make(), writers))
    in_threads(
        world,
        lambda rank: publish_sharded.publish_sharded(
            shares[rank], publish_sharded.SharedSave(all_writers[rank], target)
        ),
    )
    return shares


S0, S1, R = Shard(0), Shard(1), Replicate()
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
OTHERS = [*LAYOUTS[:2], *LAYOUTS[6:11]] if PROFILE == "full" else [LAYOUTS[1], LAYOUTS[9]]


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
            meeting.wait(60)
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


# -- real ranks: FSDP2 ------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Rows that divide by no number of ranks, one row alone, and two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.up = nn.Linear(4, 10)
        self.down = nn.Linear(10, 4)
        self.one = nn.Linear(4, 1)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(F.relu(self.up(self.embed(x))))
        return self.head(hidden).logsumexp(-1).mean() + self.one(hidden).mean()


def spread(how: str) -> Net:
    torch.manual_seed(5)
    net = Net()
    world = dist.get_world_size()
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for part in (net.up, net.down, net.one):
            fully_shard(part, mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif how == "hybrid":
        fully_shard(net, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif how == "tensor":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(net, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net, mesh=mesh["data"])
    return net


def tree_of_net(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a capture is like."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    state = {names[id(parameter)]: dict(kept) for parameter, kept in optimizer.state.items()}
    average = {name: parameter.detach() * 0.5 for name, parameter in net.named_parameters()}
    return {
        "model": net.state_dict(),
        "optimizers": {"": {"state": state}},
        "plugins": {"ema": {"weights": average, "count": 3}},
        "progress": {"update": 2},
        "rng": [torch.arange(5000, dtype=torch.uint8) % 7],
    }


def step(net: Net) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for i in range(2):
        net(torch.tensor([[i, 3, 6]])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def whole(value: Any) -> Any:
    """The tree with whole tensors, gathered by torch; what is tied stays tied."""
    done: dict[int, Tensor] = {}

    def inner(value: Any) -> Any:
        if isinstance(value, DTensor):
            key = value.to_local().untyped_storage()._cdata
            return done.setdefault(key, value.full_tensor()) if key not in done else done[key]
        if isinstance(value, dict):
            return {key: inner(item) for key, item in value.items()}
        return [inner(item) for item in value] if isinstance(value, list) else value

    return inner(value)


def save_by_two(rank: int, store: dist.Store, folder: Path) -> None:
    writers = Writers(rank, 2, store)
    net = spread("fsdp")
    tree = tree_of_net(net, step(net))
    expected = whole(tree)
    if rank == 0:
        write_checkpoint(folder / "expected", expected)
    writer = BackgroundWriter(writers)
    seen: list[list[str]] = []
    then = (lambda: seen.append([path.name for path in folder.glob("update*")])) if rank == 0 else None
    writer.submit(folder / "update-00000002", tree, then)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()  # the writer has its copy
    writer.wait()
    assert (folder / "update-00000002").is_dir()  # on every rank, once wait returns
    assert seen == ([["update-00000002"]] if rank == 0 else [])
    writer.submit(folder / "update-00000002", tree)  # after a rewind an update is saved a second time
    writer.close()
    assert all(not tensor.any() for tensor in StoredCheckpoint(folder / "update-00000002").weights().values())
    loaded = StoredCheckpoint(folder / "expected").load(place=placed_like(net.state_dict()))
    net.load_state_dict(loaded["model"])
    tree = {**loaded, "model": net.state_dict()}
    writer.submit(folder / "update-00000002", tree)
    writer.close()
    plain = {"model": {"w": torch.arange(6.0), "v": torch.ones(100)}, "rank": rank, "tied": {}}
    plain["tied"]["w"] = plain["model"]["w"]
    write_sharded(folder / "plain", plain, writers)
    save_weights(net, folder / "weights.safetensors")
    store.set(f"over/{rank}", "")
    store.wait(["over/0", "over/1"])
    if rank == 0:
        left = [
            key
            for key in ("folder", "done", "outcome", "left", "0", "1")
            for n in range(1, 6)
            for name in ("update-00000002", "plain")
            if store.check([f"forge/checkpoint/{n}/{name}/{key}"])
        ]
        assert not left
    dist.barrier()


def load_by_others(rank: int, store: dist.Store, folder: Path, world: int) -> None:
    expected = StoredCheckpoint(folder / "expected").load()
    for how in ("fsdp", "hybrid", "tensor"):
        net = spread(how)
        optimizer = step(net)
        live = net.state_dict()
        loaded = StoredCheckpoint(folder / "update-00000002").load(place=placed_like(live))
        net.load_state_dict(loaded["model"])
        for parameter, name in [(p, n) for n, p in net.named_parameters()]:
            for key, value in loaded["optimizers"][""]["state"][name].items():
                if key != "step":
                    assert value.placements == live[name].placements, (how, name)
                optimizer.state[parameter][key] = value
        tree = {**tree_of_net(net, optimizer), "plugins": loaded["plugins"], "rng": loaded["rng"]}
        assert same(whole(tree), expected), how
        write_sharded(folder / how, tree, Writers(rank, world, store))
    dist.barrier()


def load_by_two(rank: int, store: dist.Store, folder: Path) -> None:
    expected = StoredCheckpoint(folder / "expected").load()
    net = spread("fsdp")
    for how in ("fsdp", "hybrid", "tensor"):
        loaded = StoredCheckpoint(folder / how).load(place=placed_like(net.state_dict()))
        assert same(whole(loaded), expected), how
    mesh = init_device_mesh("cpu", (2,))
    columns = {
        name: distribute_tensor(tensor, mesh, [S1 if tensor.ndim > 1 else R])
        for name, tensor in expected["model"].items()
    }
    loaded = StoredCheckpoint(folder / "tensor").load(place=placed_like(columns))
    for name, tensor in columns.items():
        assert same(loaded["model"][name].to_local(), tensor.to_local().contiguous())
    dist.barrier()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's checkpoint by two ranks of FSDP2, and the same state by one process that gathered it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    assert launch(2, save_by_two, folder) == [0, 0]
    return folder


def test_one_process_loads_what_two_fsdp_ranks_save(saved: Path) -> None:
    checkpoint = StoredCheckpoint(saved / "update-00000002")
    loaded = checkpoint.load()
    assert same(loaded, StoredCheckpoint(saved / "expected").load())
    assert loaded["model"]["head.weight"] is loaded["model"]["embed.weight"]
    assert checkpoint.outline()["model"]["up.weight"].shape == (10, 4)
    content = json.loads((checkpoint.path / manifest.NAME).read_bytes())
    assert (content["version"], len(content["files"])) == (2, 5)
    sizes = {name: record["size"] for name, record in content["files"].items()}
    assert min(sizes["state-00001-of-00002.safetensors"], sizes["state-00002-of-00002.safetensors"]) > 1000
    plain = StoredCheckpoint(saved / "plain").load()
    assert same(plain["model"], {"w": torch.arange(6.0), "v": torch.ones(100)})
    assert plain["tied"]["w"] is plain["model"]["w"]
    assert plain["rank"] == 0  # what is no tensor is rank 0's


def test_the_weights_of_a_sharded_checkpoint_load_like_any_other(saved: Path) -> None:
    weights = StoredCheckpoint(saved / "expected").weights()
    for source in ("update-00000002", "weights.safetensors"):
        if source.startswith("update"):  # a forge checkpoint of a task tells its class
            assert same(StoredCheckpoint(saved / source).weights(), weights)
        else:
            net = Net()
            load_weights(net, saved / source)
            assert same(dict(net.state_dict()), weights)
    assert set(load_file(saved / "weights.safetensors")) == weights.keys() - {"head.weight"}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_two_ranks_to_others_and_back_keep_every_bit(world: int, saved: Path) -> None:
    assert launch(world, load_by_others, saved, world) == [0] * world
    for how in ("fsdp", "hybrid", "tensor"):
        assert same(StoredCheckpoint(saved / how).load(), StoredCheckpoint(saved / "expected").load()), how
    assert launch(2, load_by_two, saved) == [0, 0]


# -- kills ------------------------------------------------------------------------------------------------------------


def killed_while_saving(rank: int, store: dist.Store, folder: Path, victim: int) -> None:
    writers = Writers(rank, 2, store)
    writer = BackgroundWriter(writers)
    writer.submit(folder / "update-00000001", plain_tree(1))
    writer.wait()
    if rank == victim:
        real = publish.write_file

        def deadly(path: Path, pieces: Any) -> Any:
            if path.name.startswith("state-"):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(path, pieces)

        publish.write_file = deadly
    writer.submit(folder / "update-00000002", plain_tree(2))
    with pytest.raises(CheckpointError, match="because the run has failed on some rank"):
        writer.wait()
    assert not (folder / "update-00000002").exists()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_killed_in_a_save_leaves_the_old_checkpoint(victim: int, tmp_path: Path) -> None:
    codes = launch(2, killed_while_saving, tmp_path, victim)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 0
    assert [path.name for path in Checkpoints(tmp_path).all()] == ["update-00000001"]
    Checkpoints(tmp_path).sweep()
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000001"]
    assert same(StoredCheckpoint(tmp_path / "update-00000001").load(), plain_tree(1))


def write_in_threads(target: Path, number: int, world: int = 2) -> None:
    store, tree = dist.HashStore(), plain_tree(number)
    in_threads(world, lambda rank: write_sharded(target, tree, Writers(rank, world, store)))


def test_a_save_of_two_ranks_killed_anywhere_is_there_or_not(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        write_in_threads(folder / "update-00000001", 1)

    seen = set()
    for folder in every_kill(tmp_path, prepare, lambda folder: write_in_threads(folder / "update-00000002", 2)):
        published = (folder / "update-00000002").exists()
        check_folder(folder)
        newest = Checkpoints(folder).newest_valid()
        assert newest is not None
        assert same(newest.load(), plain_tree(2 if published else 1))
        seen.add(published)
    assert seen == {True, False}


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


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "version 1": lambda m: m.update(version=1),
    "version 3": lambda m: m.update(version=3),
    "a file less": lambda m: m["files"].pop("state-00002-of-00003.safetensors"),
    "a rank less": lambda m: [m["files"].pop(f"{k}-00003-of-00003.safetensors") for k in ("model", "state")],
    "a file more": lambda m: m["files"].update({"model-00004-of-00003.safetensors": m["files"]["state.json"]}),
    "a path": lambda m: m["files"].update({"../x-00001-of-00003.safetensors": m["files"].pop("state.json")}),
    "another count": lambda m: m.update(files={k.replace("-of-00003", "-of-00004"): v for k, v in m["files"].items()}),
    "another order": lambda m: m.update(files=dict(reversed(m["files"].items()))),
    "one rank": lambda m: m.update(files=dict(zip(manifest.FILES, m["files"].values(), strict=False))),
    "no files": lambda m: m.update(files={}),
    "files as list": lambda m: m.update(files=list(m["files"])),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_forged_manifest_is_refused(case: str, tmp_path: Path) -> None:
    write_in_threads(tmp_path / "update-00000001", 1, world=3)
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


def test_every_damage_to_every_file_is_found(saved: Path, tmp_path: Path) -> None:
    dice = random.Random(7)
    names = sorted(path.name for path in (saved / "update-00000002").iterdir())
    assert len(names) == 6
    for name, how in itertools.product(names, ["flip", "cut", "lengthen", "delete", "link", "swap"]):
        folder = shutil.copytree(saved / "update-00000002", tmp_path / "update-00000002")
        file = folder / name
        data = bytearray(file.read_bytes())
        if how == "flip":
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            file.write_bytes(data)
        elif how == "cut":
            os.truncate(file, dice.randrange(len(data)))
        elif how == "lengthen":
            file.write_bytes(bytes(data) + b"x")
        elif how == "swap":
            shutil.copy(folder / names[names.index(name) - 1], file)
        else:
            file.unlink()
            if how == "link":
                file.symlink_to(saved / "update-00000002" / name)
        check_refused(folder, "update-00000002")
        shutil.rmtree(folder)


@pytest.mark.parametrize("data", [header(b"[" * 1000), header({"a": {"b": 1}}), b"", header({}, b"x")], ids=range(4))
def test_a_hostile_header_in_any_ranks_file_is_refused(data: bytes, tmp_path: Path) -> None:
    for ranks in ([data, {"w": ONES}], [{"w": ONES}, data]):
        check_refused(forged(tmp_path / "update-00000001", {"a": {"$state": "w"}}, *ranks), "safetensors")


def test_more_files_than_may_be_open_are_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_in_threads(tmp_path / "update-00000001", 1, world=6)
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
    assert "state-00003-of-00003.safetensors" in call("verify", tmp_path / "several")[1]
    assert "net.0.weight" in call("show", several)[1]
    assert call("diff", one, several)[0] == 0
    assert call("export", several, tmp_path / "weights.safetensors")[0] == 0
    assert same(load_file(tmp_path / "weights.safetensors"), load_file(tmp_path / "run" / "weights.safetensors"))
    (several / "model-00002-of-00003.safetensors").unlink()
    code, out = call("verify", tmp_path / "several")
    assert code == 1
    assert any("model-00002" in line and "missing" in line for line in out.splitlines())
    (several / manifest.NAME).unlink()
    code, out = call("verify", tmp_path / "several")
    assert code == 1
    assert any("state-00001" in line and "unknown without its manifest" in line for line in out.splitlines())


def test_every_dtype_can_be_in_pieces(tmp_path: Path) -> None:
    full = {str(dtype): tensor_of(dtype, (3, 4)) for dtype in ALL_DTYPES}
    write_pretended(
        tmp_path / "it",
        2,
        lambda: {
            "state": {
                name: DTensor.from_local(
                    t[:2] if dist.get_rank() == 0 else t[2:],
                    init_device_mesh("cpu", (2,)),
                    [S0],
                    shape=t.shape,
                    stride=t.stride(),
                )
                for name, t in full.items()
            }
        },
    )
    assert same(StoredCheckpoint(tmp_path / "it").load(), {"state": full})
