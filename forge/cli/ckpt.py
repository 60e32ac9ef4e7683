"""`forge ckpt`: look into checkpoints, verify them, compare two, or take the weights out of one."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from forge.errors import CheckpointError, ForgeError
from forge.util import show

if TYPE_CHECKING:
    from forge.checkpoint import Checkpoints, StoredCheckpoint
    from forge.checkpoint.checkpoint import TensorInfo

EXAMPLES = """\
PATH is a checkpoint directory, a link to one (latest, best), or a run folder.

examples:
  forge ckpt show runs/quickstart/RUN                        the checkpoints of a run
  forge ckpt show runs/quickstart/RUN/checkpoints/best       what is in one
  forge ckpt verify runs/quickstart/RUN                      every byte; exit code 1 if one is damaged
  forge ckpt diff RUN_A RUN_B                                what differs; exit code 1 if anything does
  forge ckpt export runs/quickstart/RUN model.safetensors    the weights alone
  forge ckpt export RUN ema.safetensors --weights ema        the average that the plugin ema kept
"""
USAGE = {"show": "PATH", "verify": "PATH ...", "diff": "PATH PATH", "export": "PATH OUT.safetensors"}

SHOWN = 30
"""How many values diff prints."""


def parser() -> ArgumentParser:
    parser = show.new_parser("ckpt", "Show, verify, compare or export checkpoints.", EXAMPLES)
    parser.add_argument("action", choices=list(USAGE), help="what to do")
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a checkpoint, or a run folder")
    parser.add_argument("--json", action="store_true", help="show, diff: print one JSON object instead")
    parser.add_argument(
        "--weights", metavar="NAME", help="export: the average that the plugin NAME kept, or raw for what was trained"
    )
    parser.add_argument("--force", action="store_true", help="export: overwrite OUT")
    return parser


def run(args: Namespace) -> int:
    paths = [_near(Path(path)) for path in args.paths]
    match args.action, paths:
        case "show", [path]:
            return _show(path, args.json)
        case "verify", _:
            return _verify(paths)
        case "diff", [one, other]:
            return _diff(one, other, args.json)
        case "export", [path, out]:
            return _export(path, out, args.weights, args.force)
    raise ForgeError(f"Write: forge ckpt {args.action} {USAGE[args.action]}")


# -- show -------------------------------------------------------------------------------------------------------------


def _show(path: Path, as_json: bool) -> int:
    folder = _folder(path)
    if folder is not None:
        return _show_run(path, folder, as_json)
    checkpoint = _find(path)
    tree = checkpoint.outline()
    if as_json:
        _print_json(_described(checkpoint, tree))
    else:
        _print_checkpoint(checkpoint, tree)
    return 0


def _folder(path: Path) -> Checkpoints | None:
    """The checkpoints of a run folder, or of the folder in it; None where the path is a checkpoint itself."""
    from forge.checkpoint import Checkpoints

    for folder in (path / "checkpoints", path):
        checkpoints = Checkpoints(folder)
        if checkpoints.all():
            return checkpoints
    return None


def _show_run(path: Path, folder: Checkpoints, as_json: bool) -> int:
    rows = []
    for found in folder.all():
        with suppress(FileNotFoundError):  # a run that goes on has removed it meanwhile
            rows.append(_row(found, folder))
    if as_json:
        _print_json({"path": str(path), "checkpoints": rows})
        return 0
    watched = [row["monitor"] for row in rows if row["monitor"]]
    monitor = watched[-1] if watched else ""
    console = show.console()
    grid = show.table("checkpoint", "epoch", *[monitor] * bool(monitor), "size", "saved", "state", wrap=["state"])
    _right(grid, "epoch", monitor, "size")
    for row in rows:
        value = row["metrics"].get(monitor)
        epoch = row["progress"].get("epoch")
        cells = [row["name"], "" if epoch is None else str(epoch)]
        cells += [show.number(value) if isinstance(value, (int, float)) else ""] if monitor else []
        grid.add_row(*cells, size(row["bytes"]), age(row["saved"]), _state(row))
    console.print(Text.assemble((str(path), "bold"), f"  {_count(len(rows), 'checkpoint')}"), soft_wrap=True)
    console.print()
    console.print(grid)
    return 0


def _row(path: Path, folder: Checkpoints) -> dict[str, Any]:
    """One checkpoint of a run, as far as it can be read."""
    from forge.checkpoint import StoredCheckpoint

    tree, error = {}, None
    try:
        tree = StoredCheckpoint(path).outline()
    except CheckpointError as problem:
        error = str(problem)
    watching = [state for state in tree.get("plugins", {}).values() if isinstance(state, dict) and "monitor" in state]
    marks = [link.name for link in folder.folder.iterdir() if link.is_symlink() and link.resolve() == path.resolve()]
    files = [file.lstat() for file in path.iterdir()]
    return {
        "name": path.name,
        "path": str(path),
        "valid": error is None,
        "error": error,
        "marks": sorted(marks),
        "bytes": sum(file.st_size for file in files),
        "saved": max((file.st_mtime for file in files), default=path.stat().st_mtime),
        "progress": tree.get("progress", {}),
        "metrics": tree.get("metrics", {}),
        "monitor": watching[0]["monitor"] if watching else None,
    }


def _state(row: Mapping[str, Any]) -> Text:
    problem = (row["error"] or "").replace(f"{row['path']}/", "").replace(f"{row['path']} ", "").rstrip(".")
    return Text.assemble((problem, "red") if problem else ("valid", "green"), *(f", {mark}" for mark in row["marks"]))


def _print_checkpoint(checkpoint: StoredCheckpoint, tree: Mapping[str, Any]) -> None:
    from forge.checkpoint.checkpoint import averages

    console = show.console()
    found = list(tensors_of(tree))
    total = sum(tensor.bytes for _, tensor in found)
    console.print(Text.assemble((str(checkpoint.path), "bold"), ("  valid", "green")), soft_wrap=True)
    console.print()
    grid = show.table("", "", wrap=[""])
    grid.show_header = False
    task = tree["task"]
    rows = {
        "task": f"{task['class']}({_options(task['options'])})",
        "progress": _options(tree["progress"]),
        "metrics": ", ".join(f"{name}={show.number(value)}" for name, value in sorted(tree["metrics"].items())),
        "fingerprint": _options(dict(_flat(tree["fingerprint"]))),
        "versions": _options(tree["versions"]),
        "averages": ", ".join(f"{name} (export --weights {name})" for name in averages(tree)),
    }
    for label, text in rows.items():
        if text or label != "averages":
            grid.add_row(Text(label, "dim"), Text(text))
    for i, plugin in enumerate(tree["stack"]):
        text = Text(f"{plugin['name']}({_options(plugin['options'])})")
        grid.add_row(Text("" if i else "stack", "dim"), text)
    console.print(grid)
    console.print()
    console.print(_grouped(found))
    console.print(Text(f"{_count(len(found), 'tensor')}, {size(total)}", "dim"))


def _grouped(found: list[tuple[str, TensorInfo]]) -> Table:
    """Tensors of one kind in one line: layers that differ only in their number, one kind of optimizer state, a plugin's
    state."""
    groups: dict[tuple[str, ...], list[tuple[str, TensorInfo]]] = {}
    for name, tensor in found:
        part, _, rest = name.partition(".")
        if part == "model":
            key = (re.sub(r"(?<![^.])\d+(?![^.])", "*", name), tensor.dtype, str(tensor.shape))
        elif part == "plugins":
            key = (f"plugins.{rest.partition('.')[0]} …", tensor.dtype)
        else:
            key = (f"{part} … {rest.rpartition('.')[2]}", tensor.dtype)
        groups.setdefault(key, []).append((name, tensor))
    grid = show.table("tensors", "count", "shape", "dtype", "size", wrap=["tensors"])
    _right(grid, "count", "size")
    for key, members in groups.items():
        name = members[0][0] if len(members) == 1 else key[0]
        shapes = {str(tensor.shape) for _, tensor in members}
        total = sum(tensor.bytes for _, tensor in members)
        grid.add_row(name, str(len(members)), shapes.pop() if len(shapes) == 1 else "several", key[1], size(total))
    return grid


def _right(grid: Table, *columns: str) -> None:
    for column in grid.columns:
        if column.header in columns:
            column.justify = "right"


def _described(checkpoint: StoredCheckpoint, tree: Mapping[str, Any]) -> dict[str, Any]:
    """What `show --json` says of one checkpoint."""
    from forge.checkpoint.checkpoint import averages

    known = ("progress", "metrics", "task", "fingerprint", "versions", "stack")
    tensors = [
        {"name": name, "shape": list(tensor.shape), "dtype": tensor.dtype, "bytes": tensor.bytes}
        for name, tensor in tensors_of(tree)
    ]
    described = {"path": str(checkpoint.path), "valid": True, **{key: tree[key] for key in known}}
    return {**described, "averages": list(averages(tree)), "tensors": tensors}


# -- verify -----------------------------------------------------------------------------------------------------------


def _verify(paths: list[Path]) -> int:
    found: list[Path] = []
    for path in paths:
        folder = _folder(path)
        found += folder.all() if folder is not None else [_find(path).path]
    grid = show.table("checkpoint", "file", "size", "state", wrap=["state"])
    _right(grid, "size")
    bad = 0
    for path in found:
        states = file_states(path)
        bad += any(problem for _, _, problem in states)
        for i, (name, length, problem) in enumerate(states):
            state = Text(problem, "red") if problem else Text("ok", "green")
            grid.add_row("" if i else _short(path), name, "" if length is None else size(length), state)
    console = show.console()
    console.print(grid)
    console.print()
    whole = f"{_count(len(found), 'checkpoint')} verified: "
    console.print(Text(whole + (f"{bad} damaged" if bad else "all whole"), "bold red" if bad else "bold"))
    return 1 if bad else 0


def file_states(path: Path) -> list[tuple[str, int | None, str]]:
    """(name, size, what is wrong with it or "") of every file of a checkpoint."""
    from forge.checkpoint import StoredCheckpoint, manifest

    problem = ""
    try:
        StoredCheckpoint(path).verify()
    except CheckpointError as error:
        problem = str(error).replace(f"{path}/", "").replace(f"{path} ", "")
    records = _records(path / manifest.NAME)
    names = _names(path) if records is None else list(records)
    sizes = [_length(path / name) for name in (manifest.NAME, *names)]
    if not problem:
        said = [""] * len(sizes)
    elif records is None:
        said = [_irregular(path / manifest.NAME) or problem, *["unknown without its manifest"] * len(names)]
    else:
        said = ["", *(_file_problem(path / name, records[name]) for name in names)]
        if not any(said):
            said[1] = problem  # every file is as it was written, but what they say together makes no checkpoint
    return list(zip((manifest.NAME, *names), sizes, said, strict=True))


def _names(path: Path) -> list[str]:
    """The files that a checkpoint without a manifest has, or should have."""
    from forge.checkpoint import manifest

    there = sorted(file.name for file in path.glob("*-of-*.safetensors"))
    return [manifest.DOCUMENT, *there] if there else list(manifest.FILES)


def _records(file: Path) -> Mapping[str, Any] | None:
    """What a manifest says of the other files; None for one that cannot be trusted."""
    from forge.checkpoint import manifest

    if _irregular(file):
        return None
    try:
        with file.open("rb") as stream:
            return manifest.decode(stream.read(manifest.MAX_SIZE + 1), file.name)
    except (OSError, CheckpointError):
        return None


def _file_problem(file: Path, record: Any) -> str:
    problem = _irregular(file)
    if problem:
        return problem
    length = _length(file)
    if length != record.size:
        return f"{length:,} bytes instead of {record.size:,}"
    with file.open("rb") as stream:
        same = hashlib.file_digest(stream, "sha256").hexdigest() == record.sha256
    return "" if same else "not the bytes that were written"


def _irregular(file: Path) -> str:
    """Why a file should not even be opened: a link leads elsewhere, and a pipe never ends."""
    if not os.path.lexists(file):
        return "missing"
    return "" if stat.S_ISREG(file.lstat().st_mode) else "not a regular file"


def _length(file: Path) -> int | None:
    return file.lstat().st_size if os.path.lexists(file) else None


# -- diff -------------------------------------------------------------------------------------------------------------


def _diff(one: Path, other: Path, as_json: bool) -> int:
    first, second = _find(one), _find(other)
    found = compare(first.load(), second.load())
    equal = not found["values"] and not found["tensors"]
    if as_json:
        _print_json({"a": str(first.path), "b": str(second.path), "equal": equal, **found})
        return 0 if equal else 1
    console = show.console()
    for label, checkpoint in (("A", first), ("B", second)):
        console.print(Text.assemble((f"{label}  ", "bold"), str(checkpoint.path)), soft_wrap=True)
    console.print()
    if equal:
        counted = f"{_count(found['compared']['tensors'], 'tensor')}, {_count(found['compared']['values'], 'value')}"
        console.print(Text.assemble(("bit-identical", "bold green"), f": {counted}"))
        return 0
    if found["values"]:
        grid = show.table("value", "A", "B", wrap=["value", "A", "B"])
        for name, then, now in found["values"][:SHOWN]:
            grid.add_row(name, Text(_brief(then)), Text(_brief(now)))
        console.print(grid)
        if len(found["values"]) > SHOWN:
            console.print(Text(f"and {len(found['values']) - SHOWN} more", "dim"))
    if found["values"] and found["tensors"]:
        console.print()
    if found["tensors"]:
        grid = show.table("tensors of", "differ", "by up to", "the first", wrap=["the first"])
        for row in found["tensors"]:
            apart = "" if row["largest"] is None else f"{row['largest']:.3g}"
            grid.add_row(row["part"], f"{row['differ']} of {row['of']}", apart, Text(row["first"]))
        console.print(grid)
    return 1


def compare(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Every plain value that differs in two trees, and their tensors part by part, bit for bit."""
    from torch import Tensor

    ours, theirs = dict(_flat(then)), dict(_flat(now))
    values: list[tuple[str, Any, Any]] = []
    parts: dict[str, dict[str, Any]] = {}
    tensors = 0
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        a, b = ours.get(name, ABSENT), theirs.get(name, ABSENT)
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            if not _same(a, b):
                values.append((name, a, b))
            continue
        tensors += 1
        part, _, rest = name.partition(".")
        row = parts.setdefault(part, {"part": part, "differ": 0, "of": 0, "largest": None, "first": ""})
        row["of"] += 1
        told, apart = _apart(a, b)
        if told is not None:
            row["first"] = row["first"] or (rest or name) + told
            row["differ"] += 1
            if apart is not None:
                row["largest"] = max(apart, row["largest"] or 0.0)
    differing = [row for row in parts.values() if row["differ"]]
    return {
        "values": values,
        "tensors": differing,
        "compared": {"values": len(ours.keys() | theirs.keys()) - tensors, "tensors": tensors},
    }


class _Absent:
    """Stands for what only the other checkpoint has."""

    def __repr__(self) -> str:
        return "–"


ABSENT = _Absent()


def _same(a: Any, b: Any) -> bool:
    """Equal in kind and value; NaN equals NaN, and 0.0 is not -0.0."""
    return type(a) is type(b) and repr(a) == repr(b)


def _apart(a: Any, b: Any) -> tuple[str | None, float | None]:
    """None where two tensors are equal bit for bit, else a word on how they differ, and by how much at most."""
    import torch
    from torch import Tensor

    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return f" (only in {'A' if isinstance(a, Tensor) else 'B'})", None
    if a.shape != b.shape or a.dtype != b.dtype:
        described = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (a, b)]
        return f" ({described[0]} against {described[1]})", None
    if torch.equal(*(t.contiguous().reshape(-1, 1).view(torch.uint8) for t in (a, b))):
        return None, None
    if not (a.is_floating_point() or a.is_complex()):
        return "", None  # a distance between counters or bits says nothing
    wide = torch.complex128 if a.is_complex() else torch.float64
    return "", torch.nan_to_num((a.to(wide) - b.to(wide)).abs(), nan=float("inf")).max().item()


# -- export -----------------------------------------------------------------------------------------------------------


def _export(path: Path, out: Path, which: str | None, force: bool) -> int:
    if out.suffix != ".safetensors":
        raise ForgeError(f"{str(out)!r} does not end in .safetensors, by which a weights file is known.")
    if out.exists() and not force:
        raise ForgeError(f"{str(out)!r} exists. Choose another name, or overwrite it with --force.")
    from forge.checkpoint.weights import read_weights, write_weights

    weights = read_weights(path, which)
    count = write_weights(weights, out)
    kind = "" if weights.average is None else f", averaged by {weights.average}"
    seen = "" if weights.update is None else f" after {_count(weights.update, 'update')}"
    what = f"{_count(count, 'tensor')}{kind}, {size(out.stat().st_size)}, from {_as_given(weights.path, path)}{seen}"
    show.console().print(f"Wrote {out}: {what}.", soft_wrap=True)
    return 0


# -- reading and printing ---------------------------------------------------------------------------------------------


def _find(path: Path) -> StoredCheckpoint:
    """The checkpoint that a path stands for, called as the user would call it."""
    from forge.checkpoint import StoredCheckpoint

    return StoredCheckpoint(_as_given(StoredCheckpoint.find(path).path, path))


def _as_given(found: Path, given: Path) -> Path:
    """A path with its links resolved, as a path that begins like the one that the user gave."""
    for start in (given.parent, given) if given.is_symlink() else (given, given.parent):
        if found.is_relative_to(start.resolve()):
            return _near(start / found.relative_to(start.resolve()))
    return _near(found)


def _near(path: Path) -> Path:
    """A path as it is, or from the current folder where that is shorter."""
    return Path(min(str(path), os.path.relpath(path), key=len))


def tensors_of(tree: Mapping[str, Any]) -> Iterator[tuple[str, TensorInfo]]:
    """Every tensor with its path in the tree; tied ones under their first name."""
    from forge.checkpoint.checkpoint import TensorInfo

    seen: set[str] = set()
    for name, value in _flat(tree):
        if isinstance(value, TensorInfo) and value.place not in seen:
            seen.add(value.place)
            yield name, value


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, leaf) of nested mappings and lists; an empty one is a leaf."""
    pairs: Any = None
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    if pairs is None or not value:
        yield path, value
        return
    for key, inner in pairs:
        yield from _flat(inner, f"{path}.{key}" if path and key != "" else path or str(key))


def _options(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_brief(value)}" for name, value in values.items())


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _short(path: Path) -> str:
    """A checkpoint by its run and name: RUN/update-00000010."""
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    return f"{run.name}/{path.name}" if run.name else path.name


def size(count: int) -> str:
    """Bytes as people say them."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def age(then: float) -> str:
    """How long ago, in the largest unit that gives a whole number."""
    seconds = max(0, int(time.time() - then))
    for length, unit in ((86400, "day"), (3600, "hour"), (60, "min")):
        if seconds >= length:
            count = seconds // length
            return f"{count} {unit}{'s' if count > 1 and unit != 'min' else ''} ago"
    return "just now"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _print_json(content: Any) -> None:
    print(json.dumps(_plain(content), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    """As JSON can hold it: what is not finite is null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
