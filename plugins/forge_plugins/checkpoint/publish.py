"""Publish: write a checkpoint where every rank finds it, remove what is not kept then, and upload what is."""

from __future__ import annotations

from functools import partial
from typing import Any

import forge
from forge.checkpoint import BackgroundWriter, Checkpoints, DirectWriter, Writers
from forge.errors import CheckpointError


class Publisher:
    """The folder of one run, what writes to it, and what uploads from it."""

    def __init__(self, trainer: forge.Run, background: bool, remote: Any):
        assert trainer.run_dir is not None
        self.env, self.folder = trainer.env, Checkpoints(trainer.run_dir / "checkpoints")
        self.writer = (BackgroundWriter if background else DirectWriter)(Writers.of(trainer.env))
        self.mirror: Any = None
        self.kept: set[int] | None = None
        "The updates that the last clean-up kept."
        if self.env.is_main:
            self.folder.sweep()
        if remote is not None:
            with self.env.no_timeout():
                self.env.from_first(lambda: remote.begin(trainer, self.folder))
            if self.env.is_main:  # an earlier attempt may have left checkpoints to upload
                self.mirror = remote.mirror(trainer.run_dir, self.folder)
                self.mirror.hold(self.folder.updates())

    def publish(self, update: int, capture: dict[str, Any], keep: set[int], best: list[int]) -> None:
        """Write a checkpoint; once it is complete, rank 0 removes all but those to keep."""
        self.writer.submit(self.folder.path(update), capture, partial(self._tidy, update, keep, best))

    def _tidy(self, update: int, keep: set[int], best: list[int]) -> None:
        self.kept = keep
        if self.mirror is not None:
            self.mirror.hold(keep)  # first: what it uploads now is in use, and what it uploads next is kept
            keep = keep | self.mirror.in_use()
        self.folder.tidy(update, keep, best[0] if best else None)

    def end_uploads(self) -> None:
        """Wait for the uploads; remove what was kept for them alone. One that failed is an error."""
        if self.mirror is None:
            return
        try:
            with self.env.no_timeout():
                self.mirror.close()
        except CheckpointError as error:
            text = f"{error} They are complete in {self.folder.folder}: --resume uploads them."
            raise CheckpointError(text) from error
        finally:
            for number in set(self.folder.updates()) - self.kept if self.kept is not None else ():
                self.folder.remove(self.folder.path(number))
