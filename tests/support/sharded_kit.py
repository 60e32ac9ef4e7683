"""What the tests of sharded share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from forge.checkpoint import (
    BackgroundWriter,
    StoredCheckpoint,
    Writers,
    check_savable,
    manifest,
    placed_like,
    publish_sharded,
    save_weights,
    write_checkpoint,
    write_sharded,
)
from forge.checkpoint.tree import Split, split
from tests.support.ranks import in_threads, launch, pretending


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


def spread() -> Net:
    torch.manual_seed(5)
    net = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (net.up, net.down, net.one, net):
        fully_shard(part, mesh=mesh)
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
    net = spread()
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's checkpoint by two ranks of FSDP2, and the same state by one process that gathered it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    assert launch(2, save_by_two, folder) == [0, 0]
    return folder


def write_in_threads(target: Path, tree: dict[str, Any], world: int = 2) -> None:
    store = dist.HashStore()
    in_threads(world, lambda rank: write_sharded(target, tree, Writers(rank, world, store)))


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
