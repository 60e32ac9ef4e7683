"""mlflow: what the real package has stored, asked from its client."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge.errors import RecipeError
from forge.metrics import drawing
from forge_plugins import Checkpoint, Mlflow
from tests.support.logger_runs import KILLED, LAST, SAVED, bytes_below, live, live_twice
from tests.support.tasks import Classifier, fit, make_batches

pytestmark = pytest.mark.slow  # importing it takes seconds


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A store of files: a database takes seconds to make."""
    pytest.importorskip("mlflow")
    uri = (tmp_path / "store").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


def client() -> Any:
    import mlflow

    return mlflow.MlflowClient()


def run_of(folder: Path) -> Any:
    return client().get_run(json.loads((folder / "mlflow.json").read_text())["run_id"])


def series(folder: Path, name: str) -> list[tuple[int, float]]:
    """Every point that MLflow has, in the order in which it arrived."""
    return [(point.step, point.value) for point in client().get_metric_history(run_of(folder).info.run_id, name)]


def files(folder: Path, place: str) -> list[str]:
    found = client().list_artifacts(run_of(folder).info.run_id, place)
    return [name for entry in found for name in (files(folder, entry.path) if entry.is_dir else [entry.path])]


def test_a_run_has_its_metrics_parameters_and_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    live(partial(Mlflow, "digits", tags={"who": "me"}), folder, updates=20)
    run = run_of(folder)
    assert client().get_experiment_by_name("digits").experiment_id == run.info.experiment_id
    assert (run.info.run_name, run.info.status, run.data.tags["who"]) == ("run", "FINISHED", "me")
    assert (run.data.params["task.lr"], run.data.params["trainer.seed"]) == ("0.1", "0")
    assert [update for update, _ in series(folder, "train/loss")] == list(range(1, 21))
    assert [update for update, _ in series(folder, "val/loss")] == [10, 20]
    path = client().download_artifacts(run.info.run_id, "images/val/picture/00000010.png", str(tmp_path))
    assert Path(path).read_bytes() == drawing.png(forge.Image(torch.full((3, 4, 5), 0.5)))
    path = client().download_artifacts(run.info.run_id, "texts/val/note/00000020.md", str(tmp_path))
    assert Path(path).read_text() == "**bold**"


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_was_cut_short_has_each_update_once(tmp_path: Path, killed: bool) -> None:
    live(Mlflow, tmp_path / "straight")
    live_twice(Mlflow, tmp_path / "cut", killed)
    assert [update for update, _ in series(tmp_path / "cut", "train/loss")] == list(range(1, LAST + 1))
    for name in ("train/loss", "val/loss", "val/accuracy", "lr"):
        assert series(tmp_path / "cut", name) == series(tmp_path / "straight", name)
    assert len(client().search_runs([run_of(tmp_path / "cut").info.experiment_id])) == 2
    assert run_of(tmp_path / "cut").info.status == "FINISHED"
    assert SAVED < KILLED < LAST


def test_a_failed_run_says_so(tmp_path: Path) -> None:
    class Fails(Classifier):
        def training_step(self, batch: Any) -> Any:
            if self.trainer is not None and self.trainer.progress.update == 3:
                raise RuntimeError("on purpose")
            return super().training_step(batch)

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(Fails(), plugins=[Mlflow()], run_dir=tmp_path / "run", log_every=1)
    assert run_of(tmp_path / "run").info.status == "FAILED"


def test_checkpoints_are_artifacts_only_on_request(tmp_path: Path) -> None:
    best = Checkpoint("2 updates", best={"monitor": "val/loss", "mode": "min"})
    for asked in (False, True):
        folder = tmp_path / str(asked)
        plugins = [best, Mlflow(checkpoints=asked)]
        fit(val=make_batches(1), max_updates=4, plugins=plugins, run_dir=folder, validate_every="2 updates", seed=0)
        names = files(folder, "checkpoints")
        assert ("checkpoints/latest/manifest.json" in names) is asked
        assert ("checkpoints/best/manifest.json" in names) is asked


def test_a_password_is_refused_as_an_option() -> None:
    with pytest.raises(RecipeError, match="MLFLOW_TRACKING_URI"):
        Mlflow(tracking_uri="postgresql://me:secret@host/db")
    Mlflow(tracking_uri="https://host:5000/path")


def test_no_password_enters_the_run_folder_or_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "odd://me:topsecret@host/db")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "alsosecret")
    assert fit(plugins=[Mlflow(), Checkpoint()], run_dir=tmp_path / "run", log_every=1).updates == 4
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert said.startswith("mlflow: nothing more is logged there")
    for secret in ("topsecret", "alsosecret"):
        assert secret.encode() not in bytes_below(tmp_path / "run")
        assert secret not in said
