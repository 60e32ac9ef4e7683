"""MLflow logging."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forge
from forge.errors import RecipeError
from forge.metrics import drawing
from forge.runs.sinks import PASSWORD, Sink, checkpoints, run_id, scalars_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

STORE = "sqlite:///mlflow.db"
AT_ONCE = 100
"""Entries of one request: MLflow takes 1000 metrics, but only 100 parameters."""
LONGEST = 500
"""Characters of a parameter's value that every MLflow takes."""
NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class Mlflow(Sink):
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
    package = "mlflow"
    survives = Exception

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        if self.config.tracking_uri is not None and PASSWORD.search(self.config.tracking_uri):
            raise RecipeError(
                "mlflow.tracking_uri has a password in it, and options are written to the run folder. Set the "
                "environment variable MLFLOW_TRACKING_URI instead."
            )

    def begin(self) -> None:
        super().begin()
        self._run_id = ""
        self._there: set[tuple[str, int]] = set()
        "Metrics and updates that an earlier attempt has logged after the checkpoint."

    def open(self, trainer: forge.Run) -> MlflowClient:
        """Find the MLflow run of this folder, or create one."""
        from mlflow import MlflowClient

        config = self.config
        client = MlflowClient(tracking_uri=config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or STORE)

        def create() -> str:
            found = client.get_experiment_by_name(config.experiment)
            experiment = client.create_experiment(config.experiment) if found is None else found.experiment_id
            return client.create_run(experiment, run_name=self.folder.name, tags=config.tags).info.run_id

        self._run_id = run_id(trainer, self.folder / "mlflow.json", "run_id", create)
        client.update_run(self._run_id, status="RUNNING")
        if trainer.verb == "fit":
            names, last = client.get_run(self._run_id).data.metrics, trainer.resumed_from or 0
            points = (point for name in names for point in client.get_metric_history(self._run_id, name))
            self._there = {(point.key, point.step) for point in points if point.step > last}
            self._log_parameters(client, trainer)
        return client

    def reopen(self, trainer: forge.Run) -> MlflowClient:
        self._there = set()  # other points of the same updates follow
        return self.opened

    def log(self, trainer: forge.Run, update: int, metrics: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        client, now = self.ready(trainer), int(time.time() * 1000)
        named = {NOT_IN_NAMES.sub("_", name): value for name, value in scalars_of(metrics).items()}
        points = [Metric(name, float(v), now, update) for name, v in named.items() if (name, update) not in self._there]
        for some in portions(points):
            client.log_batch(self._run_id, metrics=some)
        for name, value in metrics.items():
            place = NOT_IN_NAMES.sub("_", name)
            if isinstance(value, forge.Image):
                self._log_file(f"images/{place}", f"{update:08d}.png", drawing.png(value))
                if value.caption:
                    self._log_file(f"images/{place}", f"{update:08d}.txt", value.caption.encode())
            elif isinstance(value, forge.Text):
                self._log_file(f"texts/{place}", f"{update:08d}.md", value.text.encode())

    def _log_file(self, place: str, name: str, content: bytes) -> None:
        """Log an artifact; one of the same name is replaced."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / name).write_bytes(content)
            self.opened.log_artifact(self._run_id, str(Path(folder) / name), place)

    def _log_parameters(self, client: MlflowClient, trainer: forge.Run) -> None:
        """Log the parameters that the run does not have; MLflow refuses to change one."""
        from mlflow.entities import Param

        known = client.get_run(self._run_id).data.params
        values = {NOT_IN_NAMES.sub("_", key): str(value)[:LONGEST] for key, value in trainer.hyperparameters.items()}
        new = [Param(key, value) for key, value in values.items() if key not in known]
        for some in portions(new):
            client.log_batch(self._run_id, params=some)

    def close(self, trainer: forge.Run) -> None:
        if self.config.checkpoints and trainer.verb == "fit":
            for alias, path in checkpoints(self.folder).items():
                self.opened.log_artifacts(self._run_id, str(path), f"checkpoints/{alias}")
        killed = isinstance(self.error, (forge.Interrupted, KeyboardInterrupt))
        status = "FINISHED" if self.error is None else "KILLED" if killed else "FAILED"
        self.opened.set_terminated(self._run_id, status)


def portions(entries: list[Any]) -> Iterator[list[Any]]:
    """Divide a list into requests."""
    return (entries[start : start + AT_ONCE] for start in range(0, len(entries), AT_ONCE))
