"""Weights & Biases logging."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import forge
from forge.errors import StackError
from forge.metrics import drawing
from forge.report.markdown import as_html
from forge.runs import sinks
from forge.runs.sinks import Sink, checkpoints
from forge.util.files import atomic_write, make_folder, regular_only

if TYPE_CHECKING:
    import wandb

SERVICE = "WANDB_SERVICE"
BINS = 512
"""The most bins of a histogram that wandb takes."""
Point = dict[str, Any]
"""One log as JSON: its update, and numbers, images (file and caption), texts and histograms by name."""


class Wandb(Sink):
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
    package = "wandb"
    survives = Exception

    def begin(self) -> None:
        super().begin()
        self._next = 0
        "The first update that wandb does not have yet."

    @property
    def _mode(self) -> str:
        return self.config.mode or os.environ.get("WANDB_MODE") or "online"

    @property
    def _offline(self) -> bool:
        return self._mode in ("offline", "dryrun")

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        super().forge_start(trainer)
        if sinks.writes(trainer) and self._mode == "online":
            log_in()

    def log(self, trainer: forge.Run, update: int, metrics: dict[str, Any]) -> None:
        run, journal = self.ready(trainer), Journal(self.folder / "wandb")
        point = journal.append(update, metrics)
        if point is not None and (trainer.verb == "fit" or self._offline):
            self._send(run, journal, point)
        elif point is not None:  # wandb takes no more points at the last update of the fit
            run.summary.update(point.get("scalars", {}))

    def open(self, trainer: forge.Run) -> wandb.Run:
        """Open the run, without the points of an abandoned attempt, and hand over those that wandb does not have."""
        journal, last = Journal(self.folder / "wandb"), sinks.last_kept(trainer)
        identity = sinks.run_id(trainer, journal.folder / "run.json", "id", journal.begin)
        if last is not None:
            sinks.drop_after(journal.file, last, self.name)
        if self.opened is not None and not self._offline:
            return self.opened  # after a rewind: points of updates that wandb has are not sent again
        if self.opened is not None:
            self.opened.finish()
        for folder in journal.folder.glob(f"offline-run-*-{identity}") if self._offline else ():
            shutil.rmtree(folder, ignore_errors=True)  # the journal has it all; a folder of the same second would mix
        run = self._init(trainer, identity)
        self._next = run.starting_step
        for point in journal.points():
            self._send(run, journal, point)
        return run

    reopen = open

    def _init(self, trainer: forge.Run, identity: str) -> wandb.Run:
        import wandb

        config, service = self.config, os.environ.get(SERVICE)
        run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            name=self.folder.name,
            id=identity,
            dir=str(self.folder),
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

    def close(self, trainer: forge.Run) -> None:
        if self.config.checkpoints and trainer.verb == "fit":
            log_checkpoints(self.opened, checkpoints(self.folder))
        self.opened.finish(exit_code=int(self.error is not None))


class Journal:
    """The logs of a run, a line each, with images as files beside it: wandb can get them again, each update once."""

    def __init__(self, folder: Path):
        self.folder, self.file, self.pictures = folder, folder / "journal.jsonl", folder / "pictures"

    def begin(self) -> str:
        """Forget the logs of an earlier run in this folder; return an id for a new one."""
        self.file.unlink(missing_ok=True)
        shutil.rmtree(self.pictures, ignore_errors=True)
        return uuid.uuid4().hex[:12]

    def append(self, update: int, metrics: dict[str, Any]) -> Point | None:
        """Write a log to disk; None if nothing in it can be shown."""
        histograms = sinks.of_kind(metrics, forge.Histogram)
        parts = {
            "scalars": sinks.scalars_of(metrics),
            "images": {name: [self._keep(i), i.caption] for name, i in sinks.of_kind(metrics, forge.Image).items()},
            "texts": {name: value.text for name, value in sinks.of_kind(metrics, forge.Text).items()},
            "histograms": {name: [h.counts.tolist(), h.edges.tolist()] for name, h in histograms.items()},
        }
        parts = {kind: values for kind, values in parts.items() if values}
        if not parts:
            return None
        point = {"update": update, **parts}
        with open(self.file, "a", encoding="utf-8", opener=regular_only) as file:
            file.write(json.dumps(point) + "\n")
        return point

    def points(self) -> Iterator[Point]:
        """Read all logs, in order."""
        if self.file.exists():
            with open(self.file, encoding="utf-8", opener=regular_only) as file:
                yield from map(json.loads, file)

    def _keep(self, image: forge.Image) -> str:
        drawn = drawing.png(image)
        name = f"{hashlib.sha256(drawn).hexdigest()[:32]}.png"
        if not (self.pictures / name).exists():
            make_folder(self.pictures)
            with atomic_write(self.pictures / name) as path:
                path.write_bytes(drawn)
        return name


def log_in() -> None:
    """Check that wandb has an API key; raise StackError if not."""
    import wandb

    try:
        known = wandb.login()
    except Exception as error:
        raise StackError(f"wandb: {sinks.without_passwords(error)} Or log offline: wandb.mode=offline.") from error
    if not known:
        raise StackError(
            "wandb has no API key. Run `wandb login`, set WANDB_API_KEY, or log offline: wandb.mode=offline."
        )


def as_values(point: Point, journal: Journal) -> dict[str, Any]:
    """Return a log with wandb's own types."""
    import wandb

    values: dict[str, Any] = dict(point.get("scalars", {}))
    for name, (file, caption) in point.get("images", {}).items():
        if (journal.pictures / file).exists():
            values[name] = wandb.Image(str(journal.pictures / file), caption=caption or None)
    for name, text in point.get("texts", {}).items():
        values[name] = wandb.Html(str(as_html(text)))
    for name, (counts, edges) in point.get("histograms", {}).items():
        if len(counts) <= BINS:
            values[name] = wandb.Histogram(np_histogram=(np.array(counts), np.array(edges)))
    return values


def log_checkpoints(run: wandb.Run, found: dict[str, Path]) -> None:
    """Log the latest and the best checkpoint as versions of one artifact."""
    import wandb

    for path in dict.fromkeys(found.values()):
        artifact = wandb.Artifact(f"checkpoint-{run.id}", type="model", metadata={"checkpoint": path.name})
        artifact.add_dir(str(path), policy="immutable", skip_cache=True)
        run.log_artifact(artifact, aliases=[alias for alias, where in found.items() if where == path])
