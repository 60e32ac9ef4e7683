"""Where does a plugin write? Into the run folder, where there is one, and on the main rank alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.engine.trainer import Trainer
from forge.env import Env
from forge.testing.subject import Subject, owns
from forge.testing.tiny import tiny_batches

BELOW = "Write below trainer.run_dir, and nothing where that is None"


def check_files(subject: Subject) -> None:
    """A fit without a run folder, one with one, one on a rank that is not the main one, and two verbs without both."""
    with _here() as here:
        with subject.surviving("a fit without a run folder (run_dir=False)"):
            subject.fit(subject.make(), run_dir=False)
        _refuse_files(subject, here, f"in a fit that has no run folder (run_dir=False). {BELOW}")
        for verb in ("validate", "predict"):
            with subject.surviving(f"trainer.{verb}(), where there are neither optimizers nor a run folder"):
                trainer = Trainer(plugins=[subject.make(), *subject.beside()], seed=0, device="cpu")
                getattr(trainer, verb)(subject.situation.task(), tiny_batches())
            _refuse_files(subject, here, f"in trainer.{verb}(), which has no run folder. {BELOW}")
    with _here() as here:
        with subject.surviving("a fit with a run folder"):
            subject.fit(subject.make(), folder=here / "run")
        _refuse_files(subject, here, "beside the run folder. Write below trainer.run_dir", but="run")
    plugin = subject.make()
    # a checkpoint is written by all ranks together
    if not owns(plugin, "forge_setup_env") and getattr(plugin, "forge_save", None) is None:
        with _here() as here:
            with subject.surviving("a fit on a rank that is not the main one"):
                subject.fit(plugin, OtherRank(), folder=here / "run", resume=None)
            _refuse_files(
                subject,
                here,
                "on rank 1. Ask trainer.env.is_main before anything is written, or give each rank a file of its own "
                "that is named for it (rank1.json)",
            )


@contextmanager
def _here() -> Iterator[Path]:
    """An empty folder to stand in."""
    with tempfile.TemporaryDirectory() as temporary, chdir(temporary):
        yield Path(temporary)


def _refuse_files(subject: Subject, folder: Path, why: str, but: str = "") -> None:
    found = sorted(os.path.relpath(path, folder) for path in folder.rglob("*") if path.is_file())
    found = [name for name in found if "rank1" not in name and Path(name).parts[0] != but]
    assert not found, f"{subject.name!r} writes {', '.join(found[:3])} {why}."


class OtherRank(Plugin):
    """Has the fit believe that it is not on the main rank; everything else is as on one process."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "forge.testing.other_rank"

    @hookimpl
    def forge_setup_env(self, trainer: Trainer) -> Env:
        env = Env(trainer.device)
        env.rank = 1
        return env
