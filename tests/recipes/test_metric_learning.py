"""The recipes metric_learning and mnist: what they compute against plain loops, and the data that they find."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import forge
from forge_recipes import metric_learning, mnist
from forge_recipes.metric_learning import nearest_hits, nt_xent


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small files of both data sets."""
    make = np.random.default_rng(0)
    for name in ("FashionMNIST", "MNIST"):
        folder = tmp_path / name / "raw"
        folder.mkdir(parents=True)
        for part, count in (("train", 200), ("t10k", 60)):
            images = make.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            labels = (np.arange(count) % 10).astype(np.uint8)
            for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
                head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
                (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    monkeypatch.setenv("FORGE_DATA", str(tmp_path))
    return tmp_path


def points(count: int = 30, classes: int = 4) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    return torch.randn(count, 5, generator=make), torch.randint(classes, (count,), generator=make)


def test_the_loss_is_that_of_plain_loops() -> None:
    x, y = points()
    x = torch.nn.functional.normalize(x, dim=1)
    y[0] = 99  # alone in its class: it has no partner, and is left out
    terms = []
    for i in range(len(x)):
        partners = [j for j in range(len(x)) if j != i and y[j] == y[i]]
        whole = sum(math.exp(float(x[i] @ x[k]) / 0.1) for k in range(len(x)) if k != i)
        shares = [math.exp(float(x[i] @ x[j]) / 0.1) / whole for j in partners]
        if partners:
            terms.append(-sum(map(math.log, shares)) / len(partners))
    assert len(terms) == len(x) - 1
    assert float(nt_xent(x, y, 0.1)) == pytest.approx(sum(terms) / len(terms), rel=1e-4)


def test_recall_is_that_of_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_learning, "ROWS", 7)
    x, y = points()
    plain = []
    for i in range(len(x)):
        distances = {j: float((x[i] - x[j]).norm()) for j in range(len(x)) if j != i}
        plain.append(bool(y[min(distances, key=lambda j: distances[j])] == y[i]))
    assert nearest_hits(x, y).tolist() == plain


def test_validation_shows_pictures_that_training_does_not(root: Path) -> None:
    splits: Any = metric_learning.fashion_pictures(train=120, val=70)
    seen, unseen = ({row.numpy().tobytes() for row in part.tensors[0]} for part in (splits.train, splits.val))
    assert (len(seen), len(unseen)) == (120, 70)
    assert not seen & unseen
    with pytest.raises(forge.DataError, match="more than the 200 pictures"):
        metric_learning.fashion_pictures(train=150, val=70)


def test_the_recall_of_a_validation_is_that_of_all_batches(root: Path) -> None:
    splits: Any = metric_learning.fashion_pictures(train=100, val=70)
    splits.val.batch_size = 30
    torch.manual_seed(0)
    task = metric_learning.Embedder(width=4).eval()
    found = forge.Trainer(plugins=[], run_dir=False, device="cpu").validate(task, splits.val)
    images, labels = splits.val.tensors
    with torch.no_grad():
        assert found["val/recall_at_1"] == pytest.approx(float(nearest_hits(task(images), labels).float().mean()))


def test_mnist_is_read_like_fashion_and_normalised(root: Path) -> None:
    splits: Any = mnist.mnist(val_share=0.1)
    images, labels = splits.train.tensors
    assert (len(labels), len(splits.val.tensors[1]), len(splits.test.tensors[1])) == (180, 20, 60)
    assert float(images.max()) == pytest.approx((1 - mnist.MEAN) / mnist.STD, rel=1e-3)
