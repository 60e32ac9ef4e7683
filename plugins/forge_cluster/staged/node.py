"""The folder of one run on one node: its states, whole or unfinished, and who leads there."""

from __future__ import annotations

import getpass
import hashlib
import os
import shutil
import socket
import stat
from contextlib import suppress
from pathlib import Path

from forge.checkpoint import Checkpoints, StoredCheckpoint, manifest
from forge.errors import CheckpointError
from forge.util.files import make_folder

NODE = "{node}"
KEPT = 2
"""Whole states of a run on a node."""
PART = ".part"
"""Ends the name of a state that is not known to be whole on all nodes."""


def node_name() -> str:
    """Return the name of this node; launchers that start several agents on one host count them as nodes."""
    agent = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or "0"
    return f"{socket.gethostname()}-{agent}"


def leads(rank: int, nodes: list[str]) -> bool:
    """Whether a rank is the first of its node, given the node of every rank."""
    return nodes.index(nodes[rank]) == rank


class NodeFolder:
    """What this node holds of the run in `run_dir`: whole states as `update-00000050`, others with the end `.part`."""

    def __init__(self, folder: str, run_dir: Path):
        place = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:8]
        self._root = Path(folder.replace(NODE, node_name())) / f"forge-{getpass.getuser()}"
        self.path = self._root / f"{run_dir.name}-{place}"

    def begin(self, name: str) -> Path:
        """Return the folder to write a state's files into."""
        self._refuse_anothers()
        part = self.path / f"{name}{PART}"
        make_folder(part)
        return part

    def _refuse_anothers(self) -> None:
        """Refuse a folder that another user has made: /dev/shm is everybody's."""
        make_folder(self._root.parent)
        with suppress(FileExistsError):
            self._root.mkdir(mode=0o700)
        owner = self._root.lstat()
        if owner.st_uid != os.getuid() or not stat.S_ISDIR(owner.st_mode):
            raise CheckpointError(f"{self._root} belongs to another user. Set staged.folder to a folder of your own.")

    def complete(self, name: str, encoded: bytes) -> None:
        """Name a state whose files are all there, on all nodes; remove what is older than the newest two."""
        part, whole = self.path / f"{name}{PART}", self.path / name
        (part / manifest.NAME).write_bytes(encoded)
        shutil.rmtree(whole, ignore_errors=True)  # of an attempt that was taken back
        os.rename(part, whole)
        for old in Checkpoints(self.path).all()[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        for unfinished in self.path.glob(f"*{PART}"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def held(self) -> dict[int, tuple[bytes | None, dict[str, str]]]:
        """Return by update the manifest, if it is here, and the files that are here by name."""
        found: dict[int, tuple[bytes | None, dict[str, str]]] = {}
        if not self.path.is_dir():
            return found
        self._refuse_anothers()
        for path in [*Checkpoints(self.path).all(), *self.path.glob(f"update-*{PART}")]:
            update = StoredCheckpoint(path.with_name(path.name.removesuffix(PART))).update
            record = path / manifest.NAME
            encoded = record.read_bytes() if record.is_file() else None
            files = {file.name: str(file) for file in path.iterdir() if file.name != manifest.NAME}
            known = found.get(update, (None, {}))
            found[update] = (known[0] or encoded, files | known[1])
        return found

    def remove_from(self, update: int) -> None:
        """Remove the states of an update and of those after it."""
        for path in Checkpoints(self.path).all():
            if StoredCheckpoint(path).update >= update:
                shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def files_named(encoded: bytes, what: str) -> dict[str, manifest.FileRecord]:
    """Return the files of a state by its manifest; nothing where it is damaged."""
    try:
        return manifest.decode(encoded, what)
    except CheckpointError:
        return {}
