"""Write one state on all nodes: own files, a copy for the next node, and, once all are there, the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from forge.checkpoint import manifest, publish, tensors
from forge.checkpoint.tree import Split
from forge.checkpoint.writers import SharedSave
from forge.errors import CheckpointError
from forge_cluster.staged.node import NodeFolder
from forge_cluster.staged.ring import NodeRing


class NodeWriter:
    """What a BackgroundWriter calls to write a state, on every rank."""

    def __init__(self, node: NodeFolder, ring: NodeRing, leads: bool):
        self._node, self._ring, self._leads = node, ring, leads

    def __call__(
        self, target: Path, content: Split, save: SharedSave | None, then: Callable[[], None] | None = None
    ) -> None:
        if save is None:
            records = self._write(target.name, content, 0, 1)
            self._node.complete(target.name, manifest.encode(records))
            return
        try:
            encoded = self._together(target.name, content, save)
        finally:
            save.leave()
        if self._leads:  # every rank of this node has reported its files
            self._node.complete(target.name, encoded)

    def _together(self, name: str, content: Split, save: SharedSave) -> bytes:
        writers = save.writers
        try:
            records = self._write(name, content, writers.rank, writers.world)
            own = {file: (record.size, record.sha256) for file, record in records.items()}
            self._ring.exchange(self._node.begin(name), own)
            save.report({"files": records, "layout": content.layout})
        except Exception as error:
            save.report({"error": save.blame(error)})
        if not writers.is_main:
            text = save.folder()
            save.outcome()
            return text.encode()
        reports = save.reports()
        wrong = next((report["error"] for report in reports if "error" in report), None)
        if wrong is None and any(report["layout"] != content.layout for report in reports):
            wrong = "ranks have tensors of other names, shapes or placements than rank 0"
        if wrong is not None:
            save.conclude(save.failed(wrong))
            raise CheckpointError(save.failed(wrong))
        named = {file: manifest.FileRecord(*record) for each in reports for file, record in each["files"].items()}
        encoded = manifest.encode(named)
        save.announce(encoded.decode())
        save.conclude(None)
        return encoded

    def _write(self, name: str, content: Split, rank: int, world: int) -> dict[str, manifest.FileRecord]:
        """Write the files of this rank."""
        folder = self._node.begin(name)
        alone = dict(zip(("model", "state"), manifest.FILES[1:], strict=True))
        names = manifest.files_of_rank(rank, world) if world > 1 else alone
        pieces: dict[str, Iterable[memoryview]] = {
            names[kind]: tensors.encode(getattr(content, kind), names[kind]) for kind in ("model", "state")
        }
        if rank == 0:
            pieces[manifest.DOCUMENT] = [memoryview(content.document)]
        for file in pieces:
            (folder / file).unlink(missing_ok=True)  # of an attempt that was killed
        return {file: publish.write_file(folder / file, content) for file, content in pieces.items()}
