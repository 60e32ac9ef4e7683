"""The FashionMNIST recipes: data against torchvision's reading of it, training against a loop by hand, resume."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import forge
from forge.data import Splits, TensorLoader
from forge_recipes.fashion_cnn import moved
from forge_recipes.fashion_mnist import MEAN, STD, fashion_mnist, read_idx
from tests.support.small_data import TEST, TRAIN

TINY: dict[str, Any] = {"widths": (4, 8), "depths": (0, 1)}


def unpacked(folder: Path, to: Path) -> Path:
    """The same files as torchvision wants them: unpacked, in a folder that may be written to."""
    raw = to / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for file in (folder / "FashionMNIST" / "raw").glob("*.gz"):
        (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    return to


def loader(of: Any) -> TensorLoader:
    assert isinstance(of, TensorLoader)
    return of


# -- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_image_and_label_is_torchvisions_bit_for_bit(small_data: Path, tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    transforms = torchvision.transforms
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    splits, root = fashion_mnist(), unpacked(small_data, tmp_path)
    for train, split, count in ((True, splits.train, TRAIN), (False, splits.test, TEST)):
        peer = torchvision.datasets.FashionMNIST(str(root), train=train, transform=transform)
        images, labels = next(iter(DataLoader(peer, batch_size=count)))
        mine = loader(split).tensors
        assert torch.equal(mine[0], images)
        assert torch.equal(mine[1], labels)


def test_unpacked_files_are_read_and_nothing_is_written(small_data: Path, tmp_path: Path) -> None:
    root = unpacked(small_data, tmp_path)
    raw = root / "FashionMNIST" / "raw"
    there = sorted(raw.iterdir())
    raw.chmod(0o500)
    try:
        mine = loader(fashion_mnist(root=str(root)).train)
    finally:
        raw.chmod(0o700)
    assert sorted(raw.iterdir()) == there
    assert torch.equal(mine.tensors[0], loader(fashion_mnist().train).tensors[0])


def test_a_share_for_validation_is_the_same_every_time(small_data: Path) -> None:
    whole = loader(fashion_mnist().train).tensors[0].flatten(1)
    first, second = fashion_mnist(val_share=0.25), fashion_mnist(val_share=0.25)
    train, val = loader(first.train).tensors[0].flatten(1), loader(first.val).tensors[0].flatten(1)
    assert (len(train), len(val), loader(first.test).samples) == (TRAIN * 3 // 4, TRAIN // 4, TEST)
    assert torch.equal(val, loader(second.val).tensors[0].flatten(1))
    assert sorted(map(bytes, torch.cat([train, val]).numpy())) == sorted(map(bytes, whole.numpy()))
    with pytest.raises(forge.DataError, match=r"val_share is 1\.5"):
        fashion_mnist(val_share=1.5)


def test_without_data_or_network_the_error_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FORGE_DATA", raising=False)
    with pytest.raises(forge.DataError) as told:
        fashion_mnist()
    assert str(told.value).startswith("fashion_mnist has no data. Set FORGE_DATA=FOLDER or data.root=FOLDER, where ")
    assert "\n" not in str(told.value)


class Fetches:
    """torchvision's data set as far as it is downloaded: packed and unpacked files, one after the other."""

    left: int

    def __init__(self, source: Path, root: str, download: bool):
        raw = Path(root) / "FashionMNIST" / "raw"
        raw.mkdir(parents=True)
        for file in sorted((source / "FashionMNIST" / "raw").glob("*.gz")):
            if not type(self).left:
                (raw / file.name).write_bytes(b"half of")
                raise OSError("connection lost")
            type(self).left -= 1
            (raw / file.name).write_bytes(file.read_bytes())


def test_a_broken_download_leaves_nothing_and_is_retried(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = ModuleType("torchvision.datasets")
    stub.FashionMNIST = lambda root, download: Fetches(small_data, root, download)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "torchvision.datasets", stub)
    root = tmp_path / "root"
    Fetches.left = 2
    with pytest.raises(forge.DataError, match="connection lost"):
        fashion_mnist(root=str(root))
    assert not [path for path in root.rglob("*") if path.is_file()]
    (root / "FashionMNIST" / "raw").mkdir(parents=True)
    (root / "FashionMNIST" / "raw" / "train-images-idx3-ubyte.gz").write_bytes(b"half of it, by another program")
    Fetches.left = 4
    assert loader(fashion_mnist(root=str(root)).train).samples == TRAIN
    assert Fetches.left == 0
    assert loader(fashion_mnist(root=str(root)).train).samples == TRAIN  # it is there now
    assert [path.name for path in root.iterdir()] == ["FashionMNIST"]


@pytest.mark.parametrize("content", [b"", b"\0\0\x08\x01\0\0\0\x09only", b"\x89PNG and so on"])
def test_a_file_that_is_broken_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(content)
    with pytest.raises(forge.DataError, match="train-labels-idx1-ubyte is not a complete idx file"):
        read_idx(tmp_path / "train-labels-idx1-ubyte")
    packed = gzip.compress(bytes(range(256)))
    for broken in (b"no gzip", packed[:-40], packed[:10] + b"\xff" * 30 + packed[40:]):
        (tmp_path / "x-ubyte.gz").write_bytes(broken)
        with pytest.raises(forge.DataError, match=r"x-ubyte\.gz cannot be read"):
            read_idx(tmp_path / "x-ubyte")


# -- training ---------------------------------------------------------------------------------------------------------


def recipe_run(name: str, overrides: list[str], updates: int, **given: Any) -> tuple[forge.Trainer, Any, Splits]:
    recipe = forge.recipe(name, ["trainer.device=cpu", "trainer.seed=3", *overrides])
    trainer = forge.Trainer(recipe=recipe, max_updates=updates, **given)
    return trainer, *trainer.build()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fashion_mlp", pytest.param("fashion_cnn", marks=pytest.mark.slow)])
def test_the_recipe_learns_and_draws_what_there_is_to_see(name: str, small_data: Path) -> None:
    small = ["task.hidden=64"] if name == "fashion_mlp" else ["task.widths=[8,16]", "task.depths=[0,1]", "task.lr=0.02"]
    trainer, task, data = recipe_run(name, [*small, "data.batch_size=32"], 60, run_dir=False, plugins=[])
    seen: dict[str, Any] = {}

    @forge.on("log")
    def keep(metrics: dict[str, Any]) -> None:
        seen.update(metrics)

    trainer.stack.add(keep)
    trainer.fit(task, data.train, data.val)
    assert seen["val/accuracy"] > 0.7  # by chance: 0.1
    assert {"val/predictions", "val/confusion", "val/embedding"} <= seen.keys()
    assert seen["val/embedding"].vectors.shape[0] == TEST
    assert not list(task.buffers()) or all("running" in n or "tracked" in n for n, _ in task.named_buffers())


# -- augmentation -----------------------------------------------------------------------------------------------------


def test_augmentation_draws_from_the_torch_generator_alone() -> None:
    images = torch.rand(8, 1, 28, 28)
    torch.manual_seed(1)
    first = moved(images, 2, True)
    torch.manual_seed(1)
    assert torch.equal(first, moved(images, 2, True))
    assert not torch.equal(first, moved(images, 2, True))
