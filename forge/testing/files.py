"""Check of written files: only below the run folder, and only on the main rank."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.engine.trainer import Trainer
from forge.env import Env
from forge.testing.subject import Subject, owns
from forge.testing.tiny import tiny_batches

BELOW = "Write below trainer.run_dir, and nothing if that is None"


def check_files(subject: Subject) -> None:
    """Fit without a run folder, with one, and on a rank that is not the main one; validate and predict without one."""
    with _working_in_empty_folder() as here:
        with subject.surviving("a fit without a run folder (run_dir=False)"):
            subject.fit(subject.make(), run_dir=False)
        _refuse_files(subject, here, f"in a fit that has no run folder (run_dir=False). {BELOW}")
        for verb in ("validate", "predict"):
            with subject.surviving(f"trainer.{verb}(), which has neither optimizers nor a run folder"):
                trainer = Trainer(plugins=[subject.make(), *subject.beside()], seed=0, device="cpu")
                getattr(trainer, verb)(subject.situation.task(), tiny_batches())
            _refuse_files(subject, here, f"in trainer.{verb}(), which has no run folder. {BELOW}")
    with _working_in_empty_folder() as here:
        with subject.surviving("a fit with a run folder"):
            subject.fit(subject.make(), folder=here / "run")
        _refuse_files(subject, here, "beside the run folder. Write below trainer.run_dir", but="run")
    plugin = subject.make()
    # a checkpoint is written by all ranks together, and one that divides something brings its strategy
    if not owns(plugin, "forge_setup_env") and not plugin.axes and getattr(plugin, "forge_save", None) is None:
        with _working_in_empty_folder() as here:
            with subject.surviving("a fit on a rank that is not the main one"):
                subject.fit(plugin, OtherRank(), folder=here / "run", resume=None)
            _refuse_files(
                subject,
                here,
                "on rank 1. Check trainer.env.is_main before writing, or give each rank a file of its own (rank1.json)",
            )


@contextmanager
def _working_in_empty_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as temporary, chdir(temporary):
        yield Path(temporary)


def _refuse_files(subject: Subject, folder: Path, why: str, but: str = "") -> None:
    found = sorted(os.path.relpath(path, folder) for path in folder.rglob("*") if path.is_file())
    found = [name for name in found if "rank1" not in name and Path(name).parts[0] != but]
    assert not found, f"{subject.name!r} writes {', '.join(found[:3])} {why}."


class OtherRank(Plugin):
    """Sets the rank to 1 in a single process."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "forge.testing.other_rank"

    @hookimpl(wrapper=True)
    def forge_setup_env(self) -> Generator[None, Env, Env]:
        env = yield
        env.rank = 1
        return env
