"""FashionMNIST: 70,000 pictures of clothes, 28 × 28 pixels, in ten classes; 60,000 to train on and 10,000 to test.

The four files of the data set are read compressed or not, and nothing is written next to them. The images are one
tensor in memory, so a batch is one gather.

By H. Xiao, K. Rasul and R. Vollgraf, Zalando Research, 2017, https://arxiv.org/abs/1708.07747, MIT licence.
"""

from __future__ import annotations

import gzip
import tempfile
import zlib
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forge.data import Splits, TensorLoader
from forge.errors import DataError
from forge_recipes.roots import data_root

CLASSES = (
    "T-shirt",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
MEAN, STD = 0.2860, 0.3530
"""Mean and deviation of the pixels of the 60,000 training images, between 0 and 1."""
EVALUATION_BATCH = 1000
FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


def fashion_mnist(
    batch_size: int = 64, root: str | None = None, val_share: float = 0.0, device: str | None = None
) -> Splits:
    """Load FashionMNIST, normalised. `root` is the folder with FashionMNIST/raw (default: $FORGE_DATA, or a download).

    Without a `val_share` all 60,000 images are for training and validation is the test set, as in the published lab: do
    not select models by it. With one, that share of the training images, the same in every run, is held out for
    validation, and the test set is for `forge test`. `device` holds the images; in a GPU's memory they need no copy per
    batch.
    """
    return idx_splits("FashionMNIST", batch_size, root, val_share, device, MEAN, STD)


def idx_splits(
    name: str, batch_size: int, root: str | None, val_share: float, device: str | None, mean: float, std: float
) -> Splits:
    """Load FashionMNIST, or MNIST, which has the same four files: see `fashion_mnist`."""
    if not 0 <= val_share < 1:
        verb = "fashion_mnist" if name == "FashionMNIST" else name.lower()
        raise DataError(f"{verb}: val_share is {val_share:g}; it must be a share of the training images, from 0 to 1.")
    folder = find_files(root, name)
    images, labels = read_part(folder, "train", mean, std)
    test = TensorLoader(*read_part(folder, "t10k", mean, std), batch_size=EVALUATION_BATCH, device=device)
    held_out = round(val_share * len(labels))
    val = test
    if held_out:
        # the split belongs to the data set: it does not depend on the run's seed
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(2017))
        rest, apart = order[held_out:], order[:held_out]
        val = TensorLoader(images[apart], labels[apart], batch_size=EVALUATION_BATCH, device=device)
        images, labels = images[rest], labels[rest]
    train = TensorLoader(images, labels, batch_size=batch_size, shuffle=True, device=device)
    return Splits(train=train, val=val, test=test)


def read_part(folder: Path, part: str, mean: float = MEAN, std: float = STD) -> tuple[Tensor, Tensor]:
    """Return the normalised images (N, 1, 28, 28) and the labels of "train" or "t10k"."""
    images = torch.from_numpy(read_idx(folder / f"{part}-images-idx3-ubyte")).unsqueeze(1)
    labels = torch.from_numpy(read_idx(folder / f"{part}-labels-idx1-ubyte"))
    if len(images) != len(labels):
        raise DataError(f"{folder} has {len(images)} images and {len(labels)} labels in its part {part!r}.")
    # in place, in the order of torchvision's ToTensor and Normalize: the same bits
    return images.float().div_(255).sub_(mean).div_(std), labels.long()


def read_idx(path: Path) -> np.ndarray:
    """Return the uint8 array of an idx file, compressed with gzip or not."""
    packed = path.with_name(f"{path.name}.gz")
    try:
        content = gzip.decompress(packed.read_bytes()) if packed.is_file() else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{packed if packed.is_file() else path} cannot be read: {error}.") from error
    start = 4 + 4 * content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    shape = np.frombuffer(content[4:start], dtype=">u4").tolist() if 4 < start <= len(content) else []
    if not shape or len(content) - start != np.prod(shape, dtype=int):
        raise DataError(f"{path} is not a complete idx file of bytes. Download it again.")
    return np.frombuffer(bytearray(content), np.uint8, offset=start).reshape(shape)


def find_files(root: str | None, name: str = "FashionMNIST") -> Path:
    """Return the folder with the four files; download them if missing."""
    folder = data_root(root, name) / "raw"
    if not _has_all(folder):
        _download(folder, name)
    return folder


def _has_all(folder: Path) -> bool:
    return all((folder / name).is_file() or (folder / f"{name}.gz").is_file() for name in FILES)


def _download(folder: Path, name: str) -> None:
    """Download the files to a temporary folder, and move them to their place when complete."""
    root = folder.parent.parent
    try:
        datasets = import_module("torchvision.datasets")

        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root) as part:
            getattr(datasets, name)(part, download=True)
            folder.mkdir(parents=True, exist_ok=True)
            for file in (Path(part) / name / "raw").iterdir():
                file.replace(folder / file.name)
    except (ImportError, OSError, RuntimeError) as error:
        if _has_all(folder):  # another process has downloaded them
            return
        reason = str(error).strip().partition("\n")[0].rstrip(" .:")
        verb = "fashion_mnist" if name == "FashionMNIST" else name.lower()
        raise DataError(
            f"{verb} has no data. Set FORGE_DATA=FOLDER or data.root=FOLDER, where FOLDER/{name}/raw has "
            "the four files of the data set (train-images-idx3-ubyte.gz, ...). "
            f"They are not in {folder}, and cannot be downloaded: {reason}."
        ) from error
