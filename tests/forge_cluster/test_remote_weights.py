"""Weights at URLs: read as those on disk are, verified, with errors that name the fix."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import forge
from forge.checkpoint.weights import read_weights
from forge.cli import main
from forge.errors import CheckpointError, RecipeError, TaskError
from forge_cluster.storage import object_storage
from forge_plugins import EMA, Checkpoint
from tests.support.profiles import some
from tests.support.tasks import Classifier, fit, make_batches


@pytest.fixture
def run(tmp_path: Path) -> Path:
    fit(Classifier(), make_batches(4), run_dir=tmp_path / "run", plugins=[Checkpoint(every="2 updates"), EMA(0.9)])
    return tmp_path / "run"


@pytest.fixture
def memory(run: Path) -> Iterator[str]:
    """A copy of a run in fsspec's memory."""
    fs: Any = fsspec.filesystem("memory")
    fs.put(str(run), "/weights-test/run", recursive=True)
    yield "memory://weights-test/run"
    fs.rm("/weights-test", recursive=True)


def last(run: Path) -> str:
    return max(path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("update-"))


@pytest.mark.parametrize(
    "what", some(["", "/", "/weights.safetensors", "/checkpoints", "/checkpoints/{last}"], quick=2)
)
def test_a_url_gives_what_the_path_gives(run: Path, memory: str, what: str) -> None:
    what = what.format(last=last(run))
    expected, found = read_weights(f"{run}{what}"), read_weights(f"{memory}{what}")
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(value, expected.tensors[name]) for name, value in found.tensors.items())
    assert (found.task, found.update, found.path) == (expected.task, expected.update, f"{memory}{what}".rstrip("/"))


def test_an_average_is_taken_from_the_newest_checkpoint(run: Path, memory: str) -> None:
    for which in ("ema", "raw"):
        expected, found = read_weights(run, which), read_weights(memory, which)
        assert all(torch.equal(value, expected.tensors[name]) for name, value in found.tensors.items())


def test_a_checkpoint_newer_than_the_file_is_taken(run: Path, tmp_path: Path) -> None:
    (run / "weights.safetensors").unlink()
    assert read_weights(f"file://{run}").update == read_weights(run).update == 4


@pytest.mark.slow
def test_forge_fit_and_test_take_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["quickstart", "trainer.max_updates=2", "-q"]
    assert main(["fit", *small, "--run-dir", "first"]) == 0
    url = f"file://{tmp_path}/first"
    assert main(["fit", *small, "--run-dir", "by-path", "--weights", "first"]) == 0
    assert main(["fit", *small, "--run-dir", "by-url", "--weights", url]) == 0
    both = [read_weights(name).tensors for name in ("by-path", "by-url")]
    assert all(torch.equal(value, both[1][name]) for name, value in both[0].items())


def test_errors_name_the_fix(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(url: str, said: str, kind: type[Exception] = TaskError, **options: Any) -> None:
        with pytest.raises(kind, match=said):
            forge.load_weights(Classifier(), url, **options)

    refused(f"{memory}/missing.safetensors", r"no weights file at memory://.*Check the bucket and the name")
    refused("memory://weights-test", r"no weights at memory://weights-test: neither weights.safetensors nor a complete")
    refused(f"{memory}:best", "noted on disk only. Give its URL")
    refused(memory, "noted on disk only. Give its URL", weights="best")
    refused("s3://key:secret@bucket/x.safetensors", "credentials and queries do not belong in a URL", RecipeError)
    refused("nowhere://bucket/x.safetensors", "nowhere", CheckpointError)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    refused("s3://bucket/x.safetensors", "needs a package that is not installed: .*s3fs", CheckpointError)
    monkeypatch.setattr(object_storage, "ATTEMPTS", 1)
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "get_file", lambda *_, **__: 1 / 0)
    refused(
        f"{memory}/weights.safetensors", "could not read weights.safetensors: .* AWS_ACCESS_KEY_ID", CheckpointError
    )
