"""Checkpoints on the nodes themselves, in two copies, between those on shared storage."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forge
from forge.checkpoint import BackgroundWriter, Checkpoints, Writers
from forge.env import Env
from forge.errors import CheckpointError, RecipeError
from forge_cluster.staged.bring import bring_newest
from forge_cluster.staged.node import NodeFolder, leads, node_name
from forge_cluster.staged.ring import NodeRing
from forge_cluster.staged.stage import NodeWriter
from forge_cluster.storage.runs import resumed_folder

logger = logging.getLogger("forge")


class Staged(forge.Plugin):
    """Save the run's state often, to the memory or disk of the nodes that train, each part on two nodes.

    Use it where checkpoints on shared storage are slow and therefore rare. At the interval `every`, the state is copied
    to host memory, and training continues. A thread writes each rank's part to `folder` on its own node, and sends it
    to the next node, which writes it too. So a run that loses a node, or dies as a whole, loses the updates since the
    last staged state, and not those since the last checkpoint of `checkpoint`.

    `--resume` asks every node what it holds. If the parts of a state newer than the newest checkpoint are all there,
    on whatever nodes, they are checked by their hashes and written to RUN/checkpoints as a checkpoint like any other,
    from which the run continues bit for bit. A state counts once all its parts are written on all nodes: a kill at any
    point leaves the one before it. The newest two are kept; a run that ends well removes them.

    `folder` is on the node: memory (/dev/shm, the default) outlives the processes but not a reboot; a local disk
    outlives both. It holds three states at most, each with the parts of two nodes. `{node}` in it becomes the node's
    name. On one node there is one copy, which outlives the processes alone.

    What you see: the time that training waited, in the log, and at a resume which state was brought from where. A
    staged state that cannot be written is a warning, and the run goes on.

    ::

        forge fit quickstart --nproc 2 -p ddp -p staged staged.every="50 updates" trainer.max_epochs=1
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        every: str = "50 updates"
        "How often to save: 50 updates, 1 min."
        folder: str = "/dev/shm"
        "A folder on each node, with room for six times the state of the node's ranks."

    config: Config
    observer = True
    effects = ("files", "state_dict")

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        if not Path(self.config.folder).is_absolute():
            raise RecipeError(f"staged.folder is {self.config.folder!r}; give a full path, such as /dev/shm.")
        self._every = forge.Interval(self.config.every)
        self._forget()

    def _forget(self) -> None:
        self._writer: BackgroundWriter | None = None
        self._ring: NodeRing | None = None
        self._node: NodeFolder | None = None
        self._restores, self._due, self._leads = 0, False, False
        self._failed = False
        self._error: BaseException | None = None

    @forge.hookimpl(wrapper=True)
    def forge_setup_env(self, trainer: forge.Run) -> Generator[None, Env, Env]:
        env = yield
        if trainer.verb == "fit" and trainer.resume is not None and trainer.wanted_run_dir is not False:
            with env.no_timeout():  # before the run to be resumed is chosen
                run = env.from_first(lambda: resumed_folder(trainer))
                if run is not None:
                    bring_newest(env, NodeFolder(self.config.folder, run), run)
        return env

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._forget()
        if trainer.verb != "fit" or trainer.run_dir is None:
            return
        env = trainer.env
        self._restores = trainer.restores
        self._node = NodeFolder(self.config.folder, trainer.run_dir)
        nodes = env.gather(node_name())
        self._ring, self._leads = NodeRing(env.rank, nodes), leads(env.rank, nodes)
        writers = None
        if env.world > 1:
            assert env.store is not None
            writers = Writers(env.rank, env.world, env.store)
        stage = NodeWriter(self._node, self._ring, self._leads)
        if env.is_main and self._ring.target is None:
            logger.info("staged: this run has one node, so its staged states have one copy.")
        self._writer = BackgroundWriter(writers, stage)

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run, step: forge.Step) -> None:
        if self._writer is None or self._node is None:
            return
        if trainer.restores != self._restores:  # the run went back: what it left is not to be resumed
            self._restores = trainer.restores
            with suppress(CheckpointError):
                self._writer.wait()
            if self._leads:
                self._node.remove_from(trainer.progress.update)
        self._due = self._every.due(step)
        if self._due:
            trainer.request_checkpoint(f"every {self._every}", everywhere=True, by=self.name, own=True)

    @forge.hookimpl
    def forge_save(self, trainer: forge.Run, capture: dict[str, Any], only: str | None) -> None:
        if self._writer is None or self._node is None or not self._due:
            return
        try:
            self._writer.wait()
            self._writer.submit(Checkpoints(self._node.path).path(trainer.progress.update), capture)
        except CheckpointError as error:
            self._warn(trainer, error)

    def _warn(self, trainer: forge.Run, error: Exception) -> None:
        if not self._failed and trainer.env.is_main:
            logger.warning("staged: a state was not written on the nodes; checkpoints are not concerned. %s", error)
        self._failed = True

    @forge.hookimpl
    def forge_exception(self, error: BaseException) -> None:
        self._error = error

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        writer, ring, node = self._writer, self._ring, self._node
        ended_well, led = self._error is None, self._leads
        self._forget()
        if writer is None or node is None or ring is None:
            return
        try:
            writer.close()
        except CheckpointError as error:
            self._warn(trainer, error)
        finally:
            ring.close()
        if ended_well and led:
            node.remove()
