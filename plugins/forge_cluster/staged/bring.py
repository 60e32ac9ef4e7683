"""Before a run is resumed: make a checkpoint of the newest state that its nodes still hold together."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from forge.checkpoint import Checkpoints, manifest, publish, temp_names
from forge.env import Env
from forge.runs.lock import RunLock
from forge.util.files import make_folder, sync_directory
from forge_cluster.staged.node import NodeFolder, files_named, leads, node_name

logger = logging.getLogger("forge")

CHUNK = 32 * 2**20


def bring_newest(env: Env, node: NodeFolder, run: Path) -> None:
    """Publish the newest whole state that is newer than the run's newest checkpoint. Called on all ranks."""
    own = node.held() if leads(env.rank, env.gather(node_name())) else {}
    held = env.gather({update: (encoded, list(files)) for update, (encoded, files) in own.items()})
    if not any(held):
        return
    folder = Checkpoints(run / "checkpoints")
    with RunLock(run) if env.is_main else nullcontext():
        newest = env.from_first(lambda: _newest(folder))
        for update, encoded, holders in complete(held, newest):
            mine = {name: own[update][1][name] for name, rank in holders.items() if rank == env.rank}
            if _publish(env, folder.path(update), encoded, mine):
                _tell(env, update, holders)
                return


def _newest(folder: Checkpoints) -> int:
    folder.sweep()
    found = folder.newest_valid()
    return -1 if found is None else found.update


Held = Mapping[int, tuple[bytes | None, list[str]]]
"""By update: the manifest, if it is there, and the names of files."""


def complete(held: Sequence[Held], newest: int) -> Iterator[tuple[int, bytes, dict[str, int]]]:
    """Yield the states of which every file is on some node, newest first: update, manifest, rank by file."""
    for update in sorted({update for each in held for update in each if update > newest}, reverse=True):
        encoded = next((each[update][0] for each in held if update in each and each[update][0]), None)
        wanted = files_named(encoded, f"The staged state of update {update}") if encoded else {}
        holders = {name: rank for rank, each in enumerate(held) for name in each.get(update, (None, []))[1]}
        if encoded and wanted and wanted.keys() <= holders.keys():
            yield update, encoded, {name: holders[name] for name in wanted}


def _publish(env: Env, target: Path, encoded: bytes, mine: dict[str, str]) -> bool:
    """Copy the files of all nodes into one checkpoint; whether all of them were what the manifest says."""
    with temp_names.temporary(target) as names:
        if env.is_main:
            make_folder(target.parent)
            publish.make_directory(names[0])
        partial = Path(env.broadcast(str(names[0])))
        wanted, wrong = manifest.decode(encoded, target.name), ""
        try:
            for name, source in mine.items():
                if publish.write_file(partial / name, _pieces(Path(source))) != wanted[name]:
                    wrong = f"{name} on {node_name()} is damaged"
            sync_directory(partial)
        except OSError as error:
            wrong = f"{error} on {node_name()}"
        reasons = list(filter(None, env.gather(wrong)))
        if env.is_main and not reasons:
            publish.write_file(partial / manifest.NAME, [memoryview(encoded)])
            sync_directory(partial)
            publish.move_into_place(partial, target, names[1])
        elif env.is_main:
            temp_names.remove(partial)
            logger.warning("The staged state %s is not used: %s.", target.name, "; ".join(reasons))
        return not reasons


def _pieces(file: Path) -> Iterator[memoryview]:
    with file.open("rb") as stream:
        while piece := stream.read(CHUNK):
            yield memoryview(piece)


def _tell(env: Env, update: int, holders: dict[str, int]) -> None:
    if env.is_main:
        ranks = ", ".join(map(str, sorted(set(holders.values()))))
        logger.info(
            "staged: the state of update %d was on the nodes of rank %s; it is a checkpoint now.", update, ranks
        )
