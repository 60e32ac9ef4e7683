"""The journal of a run's logs, in RUN/wandb: what was logged can be handed to wandb again, each update once."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forge
from forge.metrics import drawing
from forge.util.files import atomic_write, make_folder, regular_only
from forge_plugins.common.sinks import drop_after, scalars_of

FILE, MEDIA = "journal.jsonl", "pictures"
Point = dict[str, Any]
"""One log as JSON: its update, and numbers, images (file and caption), texts and histograms by name."""


class Journal:
    """The logs of one run, a line each; images are files beside it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def append(self, update: int, metrics: dict[str, Any]) -> Point | None:
        """Write a log to disk; None if nothing in it can be shown."""
        images = {name: value for name, value in metrics.items() if isinstance(value, forge.Image)}
        histograms = {name: value for name, value in metrics.items() if isinstance(value, forge.Histogram)}
        parts = {
            "scalars": scalars_of(metrics),
            "images": {name: [self._keep(image), image.caption] for name, image in images.items()},
            "texts": {name: value.text for name, value in metrics.items() if isinstance(value, forge.Text)},
            "histograms": {name: [h.counts.tolist(), h.edges.tolist()] for name, h in histograms.items()},
        }
        parts = {kind: values for kind, values in parts.items() if values}
        if not parts:
            return None
        point = {"update": update, **parts}
        with open(self.folder / FILE, "a", encoding="utf-8", opener=regular_only) as file:
            file.write(json.dumps(point) + "\n")
        return point

    def points(self) -> Iterator[Point]:
        """Read all logs, in order."""
        try:
            with open(self.folder / FILE, encoding="utf-8", opener=regular_only) as file:
                for line in file:
                    yield json.loads(line)
        except FileNotFoundError:
            return

    def trim(self, update: int) -> None:
        """Remove the logs of later updates, and a line that a kill has cut short."""
        drop_after(self.folder / FILE, update, "wandb")

    def clear(self) -> None:
        """Forget the logs of an earlier run in this folder."""
        (self.folder / FILE).unlink(missing_ok=True)
        shutil.rmtree(self.folder / MEDIA, ignore_errors=True)

    def picture(self, name: str) -> Path:
        """Return the path of an image of this journal."""
        return self.folder / MEDIA / name

    def _keep(self, image: forge.Image) -> str:
        drawn = drawing.png(image)
        name = f"{hashlib.sha256(drawn).hexdigest()[:32]}.png"
        if not self.picture(name).exists():
            make_folder(self.folder / MEDIA)
            with atomic_write(self.picture(name)) as path:
                path.write_bytes(drawn)
        return name
