"""torch's flight recorder: the latest collectives of this process, in words and as files for a stall report."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from forge import torch_internals as internals
from forge.torch_internals import dump_gloo_json, dump_nccl, dump_nccl_json

Entry = dict[str, Any]

SIZE_VARIABLE, SIZE = "TORCH_FR_BUFFER_SIZE", "2000"
"""How many collectives torch records; torch 2.10 records none of gloo's without the variable."""
SETTINGS = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DISTRIBUTED_", "GLOO_")
"""Beginnings of the variables that change how ranks communicate."""
SAME_SIZES = ("all_reduce", "allreduce", "all_gather_base", "allgather_base", "reduce_scatter_base")
"""Beginnings of the names of collectives to which every rank of a group gives as many numbers."""


def switch_on() -> None:
    """Let torch record collectives, for NCCL and for gloo, unless the user has set how many; before they join."""
    os.environ.setdefault(SIZE_VARIABLE, SIZE)


def settings() -> dict[str, str]:
    """Return the versions and environment variables that concern communication."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}
    return {"torch": torch.__version__, "NCCL": _nccl_version(), **found}


def entries() -> list[Entry]:
    """Return the recorded collectives, oldest first; none if the recorder is off."""
    found = [*_recorded(dump_nccl_json), *_recorded(dump_gloo_json)]
    return sorted(found, key=lambda entry: entry["time_created_ns"])


def _recorded(dump: Callable[[], str] | None) -> list[Entry]:
    return [] if dump is None else json.loads(dump()).get("entries", [])


def position(recorded: list[Entry]) -> str:
    """Return where this rank is: "waits in all_reduce of 4, number 42 of default, for 3 s"."""
    waiting = next((entry for entry in recorded if not is_done(entry)), None)
    if waiting is not None:
        seconds = (time.time_ns() - waiting["time_created_ns"]) / 1e9
        return f"waits in {where(waiting)}, for {seconds:.0f} s"
    if not recorded:
        return "has no record of its collectives"
    return f"waits in no collective; its last one was {where(recorded[-1])}"


def by_group(recorded: list[Entry]) -> list[str]:
    """Return the last finished and the first unfinished collective of each group, one line each."""
    lines = []
    for group in dict.fromkeys(entry["process_group"][0] for entry in recorded):
        inside = [entry for entry in recorded if entry["process_group"][0] == group]
        done, open_ = [e for e in inside if is_done(e)], [e for e in inside if not is_done(e)]
        lines += [f"{where(entry)}: done" for entry in done[-1:]]
        lines += [f"{where(entry)}: not done, {entry['state']}" for entry in open_[:1]]
    return lines


def waits(recorded: list[Entry]) -> dict[str, tuple[int, str]]:
    """Return the number and name of the first unfinished collective of each group, by a key that only ranks of this
    group have: when two ranks wait in different collectives of the same number, neither ends."""
    found: dict[str, tuple[int, str]] = {}
    members = _members()
    for entry in recorded:
        name = entry["process_group"][0]
        if not is_done(entry) and not entry.get("is_p2p") and name in members:
            found.setdefault(f"{name}/{members[name]}", (entry["collective_seq_id"], _alike(entry)))
    return found


def _alike(entry: Entry) -> str:
    """Return what is the same on all ranks of a collective: its name, and its sizes if they must be equal."""
    name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    return title(entry) if name.strip("_").startswith(SAME_SIZES) else name


def _members() -> dict[str, str]:
    """Return the first rank and the number of ranks of each group of this process, by the group's name."""
    world = internals.process_groups
    ranks = {name: list(world.pg_group_ranks[group]) for group, name in world.pg_names.items()}
    return {name: f"{min(each)}+{len(each)}" for name, each in ranks.items() if each}


def is_done(entry: Entry) -> bool:
    return bool(entry.get("retired")) or entry["state"] == "completed"


def where(entry: Entry) -> str:
    """ "all_reduce of 3x4, number 7 of default"."""
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    return f"{title(entry)}, number {number} of {group_title(entry['process_group'][0])}"


def title(entry: Mapping[str, Any]) -> str:
    """ "all_reduce of 3x4"."""
    name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    sizes = ", ".join("x".join(map(str, size)) or "one number" for size in entry.get("input_sizes", []))
    return f"{name} of {sizes}" if sizes else name


def group_title(name: str) -> str:
    """Return a group's description and name, or its name if it has no description."""
    for group, its_name in internals.process_groups.pg_names.items():
        if its_name == name and group is dist.group.WORLD:
            return "default"
        if its_name == name and group.group_desc not in ("", "undefined"):
            return f"{group.group_desc} ({name})"
    return name or "a group without a name"


def save(folder: Path, rank: int, dump: Mapping[str, Any]) -> None:
    """Write what this rank knows: `rank0.json` with its dump and all recorded collectives; for torch's analyser, the
    pickle `nccl_rank_0`, which forge never reads; and NCCL's own log, if NCCL_DEBUG_FILE names one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}.json").write_text(json.dumps({**dump, "collectives": entries()}, indent=1) + "\n")
    log = os.environ.get("NCCL_DEBUG_FILE")
    if log:
        with suppress(OSError):
            written = log.replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
            shutil.copyfile(written, folder / f"nccl_rank{rank}.log")
    if dump_nccl is not None and _recorded(dump_nccl_json):
        (folder / f"nccl_rank_{rank}").write_bytes(dump_nccl())


def _nccl_version() -> str:
    if not dist.is_nccl_available():
        return "none"
    return ".".join(map(str, nccl.version()))
