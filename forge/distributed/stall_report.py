"""The report of a stall: the stacks of every rank, and which rank is missing from which collective."""

from __future__ import annotations

import json
import linecache
import sys
import sysconfig
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import forge

Dump = dict[str, Any]
"""One rank's stacks, and for each process group the number and name of its latest collective."""

COLLECTIVES = "distributed_c10d.py"
FORGE = str(Path(forge.__file__).parent)
STDLIB = sysconfig.get_path("stdlib")
FRAMES = 6
"""How many innermost frames are shown of a thread other than the main one."""


def dump(skip: Iterable[int | None] = ()) -> Dump:
    """Return the stacks and collectives of this process, without the threads in `skip`."""
    frames = sys._current_frames()
    main = frames.get(threading.main_thread().ident or 0)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    others = {
        names.get(ident, str(ident)): _stack(frame)[-FRAMES:]
        for ident, frame in frames.items()
        if frame is not main and ident not in set(skip)
    }
    return {"main": _stack(main), "others": others, "groups": _groups(main), "recorded": _recorded()}


def place() -> str:
    """Return the main thread's innermost frame that is neither torch's nor Python's, as one line."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    return _line(frame) if frame is not None else ""


def stall_report(dumps: Mapping[int, Dump | None], summary: str) -> str:
    """Return the text of the report."""
    seen = {rank: each for rank, each in dumps.items() if each is not None}
    lines = [summary, *_missing(seen)]
    for rank, each in dumps.items():
        if each is None:
            lines += ["", f"rank {rank} shows no stack: it does not answer."]
            continue
        lines += ["", f"rank {rank}, main thread, innermost call last:", *(f"  {line}" for line in each["main"])]
        for name, stack in each["others"].items():
            lines += [f"  thread {name}:", *(f"    {line}" for line in stack)]
        lines += ["  torch's flight recorder:"] if each["recorded"] else []
        lines += [f"    {line}" for line in each["recorded"]]
    return "\n".join(lines)


def _missing(dumps: Mapping[int, Dump]) -> list[str]:
    """Return one line for each group in which some ranks have begun a collective that others have not."""
    lines = []
    for name in dict.fromkeys(name for each in dumps.values() for name in each["groups"]):
        inside = {rank: each["groups"][name] for rank, each in dumps.items() if name in each["groups"]}
        furthest = max(group["number"] for group in inside.values())
        behind = [rank for rank, group in inside.items() if group["number"] < furthest]
        waiting = [rank for rank, group in inside.items() if group["number"] == furthest]
        if behind:
            what = next((inside[rank]["latest"] for rank in waiting if inside[rank]["latest"]), "a collective")
            lines.append(
                f"{_ranks(behind)} {_is_are(behind)} missing from {what}, number {furthest} of the group {name}: "
                f"{_ranks(waiting)} {_is_are(waiting)} in it, {_ranks(behind)} came no further than number "
                f"{', '.join(str(inside[rank]['number']) for rank in behind)}."
            )
        elif len({group["latest"] for group in inside.values()}) > 1:
            found = ", ".join(f"rank {rank} in {group['latest'] or 'none'}" for rank, group in inside.items())
            lines.append(f"The ranks are in different collectives, number {furthest} of the group {name}: {found}.")
    return lines or ["All ranks have begun the same collectives: none is missing. See their stacks below."]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _is_are(ranks: list[int]) -> str:
    return "are" if len(ranks) > 1 else "is"


def _groups(main: FrameType | None) -> dict[str, Any]:
    """Return the number and name of the latest collective of each process group of this rank."""
    if not dist.is_initialized():
        return {}
    recorded = {entry["process_group"][0]: entry for entry in _entries()}
    groups: dict[str, Any] = {}
    for group, name in dist.distributed_c10d._world.pg_names.items():
        latest = _title(recorded[name]) if name in recorded else _called(main)
        number = group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
        groups[_group_title(name)] = {"number": number, "latest": latest}
    return groups


def _group_title(name: str) -> str:
    """Return a group's description and name, or its name if it has no description."""
    for group, its_name in dist.distributed_c10d._world.pg_names.items():
        if its_name == name and group is dist.distributed_c10d._get_default_group():
            return "default"
        if its_name == name and group.group_desc not in ("", "undefined"):
            return f"{group.group_desc} ({name})"
    return name


def _called(main: FrameType | None) -> str:
    """Return the collective that the main thread is in, by its stack."""
    if main is None:
        return ""
    for frame in _walk(main):
        if frame.f_code.co_filename.endswith(COLLECTIVES) and not frame.f_code.co_name.startswith("_"):
            return frame.f_code.co_name
    inside = [frame.f_code.co_name for frame in _walk(main) if "autograd" in frame.f_code.co_filename]
    return "the all-reduce of gradients" if inside else ""


def _entries() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorder, oldest first; none if it is off."""
    found: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        recorder = getattr(torch._C._distributed_c10d, name, None)  # pyright: ignore[reportAttributeAccessIssue]
        if recorder is not None:
            found += json.loads(recorder()).get("entries", [])
    return sorted(found, key=lambda entry: entry["time_created_ns"])


def _recorded() -> list[str]:
    """Return the last finished and the first unfinished collective of each group, one line each."""
    lines = []
    entries = _entries()
    for group in dict.fromkeys(entry["process_group"][0] for entry in entries):
        done, open_ = [], []
        for entry in entries:
            if entry["process_group"][0] == group:
                (done if entry.get("retired") or entry["state"] == "completed" else open_).append(entry)
        for entry, word in [(e, "done") for e in done[-1:]] + [(e, f"not done, {e['state']}") for e in open_[:1]]:
            lines.append(f"{_title(entry)}, number {entry['collective_seq_id']} of {_group_title(group)}: {word}")
    return lines


def _title(entry: Mapping[str, Any]) -> str:
    """ "all_reduce of 3x4"."""
    name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    sizes = ", ".join("x".join(map(str, size)) or "one number" for size in entry.get("input_sizes", []))
    return f"{name} of {sizes}" if sizes else name


def _stack(frame: FrameType | None) -> list[str]:
    """Return one line per frame, outermost first; of consecutive frames of torch or Python only the last."""
    frames = _walk(frame)
    lines = []
    for here, following in zip(frames, [*frames[1:], None], strict=True):
        if following is None or not (_is_library(here) and _is_library(following)):
            lines.append(_line(here))
    return lines


def _walk(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _is_library(frame: FrameType) -> bool:
    """Whether a frame is torch's or Python's; forge's own are shown, since they locate the place in a run."""
    path = frame.f_code.co_filename
    return not path.startswith(FORGE) and ("site-packages" in path or path.startswith((STDLIB, "<")))


def _line(frame: FrameType) -> str:
    """ "forge/engine/default_actions.py:120 forge_micro_step: loss.backward()"."""
    path, number = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(path, number).strip()
    if path.startswith(FORGE):
        path = f"forge{path.removeprefix(FORGE)}"
    path = path.rpartition("site-packages/")[2]
    return f"{path}:{number} {frame.f_code.co_name}{': ' + source if source else ''}"
