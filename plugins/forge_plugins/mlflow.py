"""MLflow logging."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forge
from forge.checkpoint import wait_until_written
from forge.errors import RecipeError
from forge.metrics import drawing
from forge.util.files import atomic_write, make_folder
from forge_plugins.common.sinks import PASSWORD, Failures, refuse_missing, scalars_of, writes

if TYPE_CHECKING:
    from mlflow import MlflowClient

STORE = "sqlite:///mlflow.db"
AT_ONCE = 100
"""Entries of one request: MLflow takes 1000 metrics, but only 100 parameters."""
LONGEST = 500
"""Characters of a parameter's value that every MLflow takes."""
NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class Mlflow(forge.Plugin):
    """Log the run to MLflow: hyperparameters, metrics, images and texts; checkpoints on request.

    When to use it: to collect runs on an MLflow server, or in a database file. It needs `pip install
    'forge-trainer[mlflow]'`. Set MLFLOW_TRACKING_URI to the server's address; an address with a password belongs there,
    and is refused as an option, because options are written to the run folder. Without any address the runs go to
    mlflow.db in the working directory; `mlflow ui` shows them (it is part of the package `mlflow`).

    What you see: one MLflow run for each run folder, with the folder's name, its hyperparameters as parameters, every
    metric over updates, images and texts as artifacts (`images/NAME/UPDATE.png`), and the status finished, failed or
    killed. Histograms and embeddings are not included. With `checkpoints` the latest and the best checkpoint are logged
    as artifacts at the end of a fit; `checkpoint` must be in the stack.

    A resumed run continues the same MLflow run; a point that MLflow has already is not logged again. MLflow cannot take
    points back: after a rewind (`guard`) it has both, and shows the later one as the latest. Points are sent during the
    log that they belong to, so a kill loses none; a slow server slows the run. Only the main process logs, and only
    with a run folder. If MLflow fails, one error is logged, and the run continues without it.

    ::

        forge fit quickstart -p mlflow mlflow.experiment=digits
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        experiment: str = "forge"
        "The MLflow experiment; it is created where it does not exist."
        tracking_uri: str | None = None
        "Where to log, without a password; null: MLFLOW_TRACKING_URI, else mlflow.db in the working directory."
        tags: dict[str, str] = field(default_factory=dict)
        "Tags of the MLflow run."
        checkpoints: bool = False
        "Log the latest and the best checkpoint as artifacts at the end of a fit."

    config: Config
    observer = True

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        if self.config.tracking_uri is not None and PASSWORD.search(self.config.tracking_uri):
            raise RecipeError(
                "mlflow.tracking_uri has a password in it, and options are written to the run folder. Set the "
                "environment variable MLFLOW_TRACKING_URI instead."
            )
        self._begin()

    def _begin(self) -> None:
        """Reset the state of one run."""
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._failures = Failures("mlflow")
        self._status = "FINISHED"
        self._there: set[tuple[str, int]] = set()
        "Metrics and updates that an earlier attempt has logged after the checkpoint."
        self._restores = 0

    @forge.hookimpl
    def forge_configure(self) -> None:
        refuse_missing("mlflow", "mlflow")

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._begin()

    @forge.hookimpl
    def forge_log(self, trainer: forge.Run, update: int, metrics: dict[str, Any]) -> None:
        if writes(trainer) and not self._failures.given_up:
            with self._failures.noted():
                self._log(trainer, update, metrics)

    def _log(self, trainer: forge.Run, update: int, metrics: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        client = self._client or self._open(trainer)
        if self._restores != trainer.restores:  # a rewind: other points of the same updates follow
            self._restores, self._there = trainer.restores, set()
        now = int(time.time() * 1000)
        named = {NOT_IN_NAMES.sub("_", name): value for name, value in scalars_of(metrics).items()}
        points = [Metric(name, float(v), now, update) for name, v in named.items() if (name, update) not in self._there]
        for some in portions(points):
            client.log_batch(self._run_id, metrics=some)
        for name, value in metrics.items():
            place = NOT_IN_NAMES.sub("_", name)
            if isinstance(value, forge.Image):
                self._log_file(client, f"images/{place}", f"{update:08d}.png", drawing.png(value))
                if value.caption:
                    self._log_file(client, f"images/{place}", f"{update:08d}.txt", value.caption.encode())
            elif isinstance(value, forge.Text):
                self._log_file(client, f"texts/{place}", f"{update:08d}.md", value.text.encode())

    def _log_file(self, client: MlflowClient, place: str, name: str, content: bytes) -> None:
        """Log an artifact; one of the same name is replaced."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / name).write_bytes(content)
            client.log_artifact(self._run_id, str(Path(folder) / name), place)

    def _open(self, trainer: forge.Run) -> MlflowClient:
        """Find the MLflow run of this folder, or create one."""
        from mlflow import MlflowClient

        assert trainer.run_dir is not None
        uri = self.config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or STORE
        client = MlflowClient(tracking_uri=uri)
        file = trainer.run_dir / "mlflow.json"
        self._restores = trainer.restores
        if file.exists() and (trainer.verb != "fit" or trainer.resumed_from is not None):
            self._run_id = json.loads(file.read_text(encoding="utf-8"))["run_id"]
            client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = client.create_run(
                self._experiment(client), run_name=trainer.run_dir.name, tags=self.config.tags
            ).info.run_id
            make_folder(trainer.run_dir)
            with atomic_write(file) as path:
                path.write_text(json.dumps({"run_id": self._run_id}) + "\n", encoding="utf-8")
        if trainer.verb == "fit":
            self._there = logged_after(client, self._run_id, trainer.resumed_from or 0)
            self._log_parameters(client, trainer)
        self._client = client
        return client

    def _experiment(self, client: MlflowClient) -> str:
        found = client.get_experiment_by_name(self.config.experiment)
        return found.experiment_id if found is not None else client.create_experiment(self.config.experiment)

    def _log_parameters(self, client: MlflowClient, trainer: forge.Run) -> None:
        """Log the parameters that the run does not have; MLflow refuses to change one."""
        from mlflow.entities import Param

        known = client.get_run(self._run_id).data.params
        values = {NOT_IN_NAMES.sub("_", key): str(value)[:LONGEST] for key, value in trainer.hyperparameters.items()}
        new = [Param(key, value) for key, value in values.items() if key not in known]
        for some in portions(new):
            client.log_batch(self._run_id, params=some)

    @forge.hookimpl
    def forge_exception(self, error: BaseException) -> None:
        self._status = "KILLED" if isinstance(error, (forge.Interrupted, KeyboardInterrupt)) else "FAILED"

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        client, self._client = self._client, None
        if client is None or trainer.run_dir is None:
            return
        with self._failures.noted():
            if self.config.checkpoints and trainer.verb == "fit":
                wait_until_written()
                folder = trainer.run_dir / "checkpoints"
                for alias in ("latest", "best"):
                    if (folder / alias).is_dir():
                        client.log_artifacts(self._run_id, str((folder / alias).resolve()), f"checkpoints/{alias}")
            client.set_terminated(self._run_id, self._status)


def portions(entries: list[Any]) -> Iterator[list[Any]]:
    """Divide a list into requests."""
    return (entries[start : start + AT_ONCE] for start in range(0, len(entries), AT_ONCE))


def logged_after(client: MlflowClient, run_id: str, update: int) -> set[tuple[str, int]]:
    """Return metrics and updates that a run has already, after an update."""
    names = client.get_run(run_id).data.metrics
    points = (point for name in names for point in client.get_metric_history(run_id, name))
    return {(point.key, point.step) for point in points if point.step > update}
