"""Weights & Biases logging."""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import forge
from forge.checkpoint import wait_until_written
from forge.errors import StackError
from forge.report.markdown import as_html
from forge.util.files import atomic_write, make_folder
from forge_plugins.common.sinks import Failures, refuse_missing, without_passwords, writes
from forge_plugins.wandb.journal import Journal, Point

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger("forge")

SERVICE = "WANDB_SERVICE"
BINS = 512
"""The most bins of a histogram that wandb takes."""


class Wandb(forge.Plugin):
    """Log the run to Weights & Biases: hyperparameters, metrics, images and texts; checkpoints on request.

    When to use it: to follow runs in a browser from anywhere, and to share them. It needs `pip install
    'forge-trainer[wandb]'`. Log in once with `wandb login`, or set WANDB_API_KEY; forge never reads or stores the key.
    Without a network use `wandb.mode=offline`, and upload later with `wandb sync RUN/wandb/offline-run-*`.

    What you see: one wandb run for each run folder, with the folder's name, its hyperparameters as config, and every
    metric over updates. `forge.Image`, `forge.Text` and `forge.Histogram` are included, `forge.Embedding` is not. With
    `checkpoints` the latest and the best checkpoint are logged as an artifact at the end of a fit; `checkpoint` must be
    in the stack.

    A resumed run continues the same wandb run, each update once. RUN/wandb/journal.jsonl has every log: what a kill
    kept from wandb is sent again, and what wandb has already is not. Offline there is one folder with the whole run,
    written again at a resume. wandb cannot take points back: after a rewind (`guard`) a run online keeps the points
    from before it, a run offline does not. Only the main process logs, and only with a run folder. If wandb fails, one
    error is logged, and the run continues without it. The console, the code and git are not recorded.

    ::

        forge fit quickstart -p wandb wandb.mode=offline
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        project: str = "forge"
        "The wandb project."
        entity: str | None = None
        "The user or team that owns the project; null: your default."
        mode: Literal["online", "offline"] | None = None
        "Whether to upload during the run; null: as WANDB_MODE says, else online."
        group: str | None = None
        "A group of runs, for instance the folds of a cross-validation."
        tags: list[str] = field(default_factory=list)
        "Words to filter runs by."
        checkpoints: bool = False
        "Log the latest and the best checkpoint as an artifact at the end of a fit."

    config: Config
    observer = True

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        self._begin()

    def _begin(self) -> None:
        """Reset the state of one run."""
        self._run: wandb.Run | None = None
        self._failures = Failures("wandb")
        self._failed = False
        self._restores = 0
        self._next = 0
        "The first update that wandb does not have yet."

    @property
    def _mode(self) -> str:
        return self.config.mode or os.environ.get("WANDB_MODE") or "online"

    @property
    def _offline(self) -> bool:
        return self._mode in ("offline", "dryrun")

    @forge.hookimpl
    def forge_configure(self) -> None:
        refuse_missing("wandb", "wandb")

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._begin()
        if writes(trainer) and self._mode == "online":
            log_in()

    @forge.hookimpl
    def forge_log(self, trainer: forge.Run, update: int, metrics: dict[str, Any]) -> None:
        if writes(trainer) and not self._failures.given_up:
            with self._failures.noted():
                self._log(trainer, update, metrics)

    def _log(self, trainer: forge.Run, update: int, metrics: dict[str, Any]) -> None:
        assert trainer.run_dir is not None
        journal = Journal(trainer.run_dir / "wandb")
        run = self._run
        if run is None or self._restores != trainer.restores:
            run = self._open(trainer, journal)
        point = journal.append(update, metrics)
        if point is not None and (trainer.verb == "fit" or self._offline):
            self._send(run, journal, point)
        elif point is not None:  # wandb takes no more points at the last update of the fit
            run.summary.update(point.get("scalars", {}))

    def _open(self, trainer: forge.Run, journal: Journal) -> wandb.Run:
        """Open the run, without the points of an abandoned attempt, and hand over those that wandb does not have."""
        assert trainer.run_dir is not None
        self._restores = trainer.restores
        identity = run_id(journal, new=trainer.verb == "fit" and trainer.resumed_from is None)
        if trainer.verb == "fit" and trainer.resumed_from is not None:
            journal.trim(trainer.resumed_from)
        if self._run is not None and not self._offline:
            return self._run  # after a rewind: points of updates that wandb has are not sent again
        if self._run is not None:
            self._run.finish()
        for folder in journal.folder.glob(f"offline-run-*-{identity}") if self._offline else ():
            shutil.rmtree(folder, ignore_errors=True)  # the journal has it all; a folder of the same second would mix
        run = self._run = self._init(trainer, identity)
        self._next = run.starting_step
        for point in journal.points():
            self._send(run, journal, point)
        return run

    def _init(self, trainer: forge.Run, identity: str) -> wandb.Run:
        import wandb

        config, folder, service = self.config, trainer.run_dir, os.environ.get(SERVICE)
        assert folder is not None
        run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            name=folder.name,
            id=identity,
            dir=str(folder),
            mode=self._mode,  # pyright: ignore[reportArgumentType]
            config=dict(trainer.hyperparameters) if trainer.verb == "fit" else None,
            allow_val_change=True,
            resume=None if self._offline else "allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", disable_git=True, save_code=False, silent=True),
        )
        if service is None:
            os.environ.pop(SERVICE, None)  # or processes that this one starts would share its service, and its runs
        return run

    def _send(self, run: wandb.Run, journal: Journal, point: Point) -> None:
        """Hand one log to wandb, unless wandb has it."""
        update: int = point["update"]
        if update >= self._next:
            self._next = update  # the train log and the validation of an update are one row
            run.log(as_values(point, journal), step=update)

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._failed = True

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        run, self._run = self._run, None
        if run is None or trainer.run_dir is None:
            return
        with self._failures.noted():
            if self.config.checkpoints and trainer.verb == "fit":
                wait_until_written()
                log_checkpoints(run, trainer.run_dir / "checkpoints")
            run.finish(exit_code=int(self._failed))


def log_in() -> None:
    """Check that wandb has an API key; raise StackError if not."""
    import wandb

    try:
        known = wandb.login()
    except Exception as error:
        raise StackError(f"wandb: {without_passwords(error)} Or log offline: wandb.mode=offline.") from error
    if not known:
        raise StackError(
            "wandb has no API key. Run `wandb login`, set WANDB_API_KEY, or log offline: wandb.mode=offline."
        )


def run_id(journal: Journal, new: bool) -> str:
    """Return the id of the wandb run of a run folder; it is on disk before wandb hears of it."""
    file = journal.folder / "run.json"
    make_folder(journal.folder)
    if not new and file.exists():
        return json.loads(file.read_text(encoding="utf-8"))["id"]
    journal.clear()
    identity = uuid.uuid4().hex[:12]
    with atomic_write(file) as path:
        path.write_text(json.dumps({"id": identity}) + "\n", encoding="utf-8")
    return identity


def as_values(point: Point, journal: Journal) -> dict[str, Any]:
    """Return a log with wandb's own types."""
    import wandb

    values: dict[str, Any] = dict(point.get("scalars", {}))
    for name, (file, caption) in point.get("images", {}).items():
        if journal.picture(file).exists():
            values[name] = wandb.Image(str(journal.picture(file)), caption=caption or None)
    for name, text in point.get("texts", {}).items():
        values[name] = wandb.Html(str(as_html(text)))
    for name, (counts, edges) in point.get("histograms", {}).items():
        if len(counts) <= BINS:
            values[name] = wandb.Histogram(np_histogram=(np.array(counts), np.array(edges)))
    return values


def log_checkpoints(run: wandb.Run, folder: Path) -> None:
    """Log the latest and the best checkpoint as versions of one artifact."""
    import wandb

    aliases: dict[Path, list[str]] = {}
    for alias in ("best", "latest"):
        if (folder / alias).is_dir():
            aliases.setdefault((folder / alias).resolve(), []).append(alias)
    for path, names in aliases.items():
        artifact = wandb.Artifact(f"checkpoint-{run.id}", type="model", metadata={"checkpoint": path.name})
        artifact.add_dir(str(path), policy="immutable", skip_cache=True)
        run.log_artifact(artifact, aliases=names)
