"""The report of a stall: the stacks of every rank, and which rank is missing from which collective."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch.distributed as dist

from forge import torch_internals as internals
from forge.distributed import flight_recorder
from forge.util.stacks import lines, walked

Dump = dict[str, Any]
"""One rank's stacks; for each process group the number and name of its latest collective; where the flight recorder
sees it; and the settings of its communication."""

COLLECTIVES = "distributed_c10d.py"
FRAMES = 6
"""How many innermost frames are shown of a thread other than the main one."""


def dump(skip: Iterable[int | None] = ()) -> Dump:
    """Return the stacks and collectives of this process, without the threads in `skip`."""
    frames = sys._current_frames()
    main = frames.get(threading.main_thread().ident or 0)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    others = {
        names.get(ident, str(ident)): lines(frame)[-FRAMES:]
        for ident, frame in frames.items()
        if frame is not main and ident not in set(skip)
    }
    recorded = flight_recorder.entries()
    return {
        "main": lines(main),
        "others": others,
        "groups": _groups(main, recorded),
        "position": flight_recorder.position(recorded),
        "recorded": flight_recorder.by_group(recorded),
        "settings": flight_recorder.settings(),
    }


def stall_report(dumps: Mapping[int, Dump | None], summary: str, silent: Mapping[int, str] | None = None) -> str:
    """Return the text of the report. It begins with the ranks that do not answer, and what is known of each."""
    seen = {rank: each for rank, each in dumps.items() if each is not None}
    lines = [f"rank {rank} does not answer: {known}" for rank, known in (silent or {}).items()]
    lines += [summary, *_missing(seen, [rank for rank in dumps if rank not in seen])]
    lines += [f"rank {rank} {each['position']}." for rank, each in seen.items()]
    lines += _settings(seen)
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


def _missing(dumps: Mapping[int, Dump], silent: list[int]) -> list[str]:
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
            lines.append(
                f"The ranks are in different collectives, number {furthest} of the group {name}: {found}. They took "
                "different branches: look for what differs between them, as a layer that a rank skips at random."
            )
    if any(each["settings"].get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL" for each in dumps.values()):
        lines.append(
            "With TORCH_DISTRIBUTED_DEBUG=DETAIL ranks wait for each other before a collective counts: the late rank "
            "is the one whose stack is in none."
        )
    if silent and not lines:
        return [f"All others have begun the same collectives: they wait for {_ranks(silent)}. See their stacks below."]
    return lines or ["All ranks have begun the same collectives: none is missing. See their stacks below."]


def _settings(dumps: Mapping[int, Dump]) -> list[str]:
    """Return the settings of communication: those that all ranks share in one line, each other one in its own."""
    by_rank = {rank: each["settings"] for rank, each in dumps.items()}
    shared, lines = [], []
    for name in dict.fromkeys(name for settings in by_rank.values() for name in settings):
        values = {rank: settings.get(name, "not set") for rank, settings in by_rank.items()}
        if len(set(values.values())) == 1:
            shared.append(f"{name}={next(iter(values.values()))}")
        else:
            told = ", ".join(f"{value} on rank {rank}" for rank, value in values.items())
            lines.append(f"{name} differs: {told}.")
    return [*([f"settings: {' '.join(shared)}"] if shared else []), *lines]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _is_are(ranks: list[int]) -> str:
    return "are" if len(ranks) > 1 else "is"


def _groups(main: FrameType | None, entries: list[flight_recorder.Entry]) -> dict[str, Any]:
    """Return the number and name of the latest collective of each process group of this rank."""
    if not dist.is_initialized():
        return {}
    recorded = {entry["process_group"][0]: entry for entry in entries}
    groups: dict[str, Any] = {}
    for group, name in internals.process_groups.pg_names.items():
        latest = flight_recorder.title(recorded[name]) if name in recorded else _called(main)
        number = group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
        groups[flight_recorder.group_title(name)] = {"number": number, "latest": latest}
    return groups


def _called(main: FrameType | None) -> str:
    """Return the collective that the main thread is in, by its stack."""
    if main is None:
        return ""
    for frame in walked(main):
        if frame.f_code.co_filename.endswith(COLLECTIVES) and not frame.f_code.co_name.startswith("_"):
            return frame.f_code.co_name
    inside = [frame.f_code.co_name for frame in walked(main) if "autograd" in frame.f_code.co_filename]
    return "the all-reduce of gradients" if inside else ""
