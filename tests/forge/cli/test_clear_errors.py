"""Places and files that fail: the error names them, and what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import forge
from forge.checkpoint import weights
from forge.cli import main
from forge.testing.tiny import TinyTask, tiny_batches
from forge_plugins import JSONL, Checkpoint, Progress


@pytest.fixture
def deleted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that is gone."""
    import torch._dynamo  # noqa: F401 (torch cannot import it without a working directory)

    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    return tmp_path / "gone"


@pytest.mark.parametrize("words", [["fit", "quickstart"], ["runs"], ["new", "task", "mine"], ["report", "x"]])
def test_a_deleted_working_directory_is_named(
    deleted_folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: The working directory no longer exists")
    assert "cd" in said


def fit(run_dir: Path | str | None, *plugins: forge.Plugin) -> forge.FitResult:
    trainer = forge.Trainer(plugins=[Checkpoint(), *plugins], run_dir=run_dir, max_epochs=1, seed=0, device="cpu")
    return trainer.fit(TinyTask(), tiny_batches())


def test_a_run_elsewhere_does_not_need_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")

    @forge.on("boundary")
    def delete(trainer: forge.Trainer) -> None:
        if trainer.progress.update == 1:
            (tmp_path / "gone").rmdir()

    assert fit(tmp_path / "run", delete, JSONL(), Progress()).updates == 5
    assert (tmp_path / "run" / "weights.safetensors").is_file()
    assert fit(tmp_path / "again", JSONL(), Progress()).updates == 5


@pytest.mark.parametrize("fails", ["save_file", "_sort_metadata_and_sync"])
def test_an_export_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(weights, fails, broken)
    with pytest.raises(forge.CheckpointError) as caught:
        fit(tmp_path / "run")
    assert f"{tmp_path / 'run' / 'weights.safetensors'} could not be written: Input/output error" in str(caught.value)
    assert "forge ckpt export" in str(caught.value)
    assert [file.name for file in (tmp_path / "run").iterdir() if "weights" in file.name] == []
    assert (tmp_path / "run" / "checkpoints" / "update-00000005").is_dir()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("import", "'import' is a word of Python itself"),
        ("None", "'None' is a word of Python itself"),
        ("Class", "'Class' is a word of Python itself"),
        ("json", "json.py would hide the module 'json'"),
        ("torch", "torch.py would hide the module 'torch'"),
    ],
)
def test_a_task_gets_no_name_that_python_uses(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "task", name]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert f"forge new task my_{name.lower()}" in error
    assert os.listdir() == []
