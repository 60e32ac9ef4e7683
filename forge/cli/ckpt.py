"""`forge ckpt`: show, verify, compare or export checkpoints."""

from __future__ import annotations

import json
import math
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from forge.errors import CheckpointError, ForgeError
from forge.runs.wording import counted, short_moment
from forge.util import show
from forge.util.text import few, format_bytes

if TYPE_CHECKING:
    from forge.checkpoint import Checkpoints, StoredCheckpoint
    from forge.checkpoint.checkpoint import TensorInfo

EXAMPLES = """\
PATH is a checkpoint directory, a link to one (latest, best), or a run folder.

examples:
  forge ckpt show runs/quickstart/RUN                        the checkpoints of a run
  forge ckpt show runs/quickstart/RUN/checkpoints/best       the contents of one checkpoint
  forge ckpt verify runs/quickstart/RUN                      check every byte; exit code 1 if one is damaged
  forge ckpt diff RUN_A RUN_B                                exit code 1 if anything differs
  forge ckpt export runs/quickstart/RUN model.safetensors    the weights alone
  forge ckpt export RUN OUT.safetensors --weights PLUGIN     the average that a plugin kept
"""
USAGE = {"show": "PATH", "verify": "PATH ...", "diff": "PATH PATH", "export": "PATH OUT.safetensors"}

SHOWN = 30
"""Maximum number of values that diff prints."""


def parser() -> ArgumentParser:
    parser = show.new_parser("ckpt", "Show, verify, compare or export checkpoints.", EXAMPLES)
    parser.add_argument("action", choices=list(USAGE), help="what to do")
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a checkpoint, or a run folder")
    parser.add_argument("--json", action="store_true", help="show, diff: print one JSON object instead")
    parser.add_argument(
        "--weights", metavar="NAME", help="export: the average of the plugin NAME, or raw for the trained weights"
    )
    parser.add_argument("--force", action="store_true", help="export: overwrite OUT, and write NaN too")
    return parser


def run(args: Namespace) -> int:
    paths = [show.near(Path(path)) for path in args.paths]
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
        _print_json(_as_json(checkpoint, tree))
    else:
        _print_checkpoint(checkpoint, tree)
    return 0


def _folder(path: Path) -> Checkpoints | None:
    """Return the checkpoints of a run folder or checkpoints folder; None if the path is a checkpoint itself."""
    from forge.checkpoint import Checkpoints

    for folder in (path / "checkpoints", path):
        checkpoints = Checkpoints(folder)
        if checkpoints.all():
            return checkpoints
    return None


def _show_run(path: Path, folder: Checkpoints, as_json: bool) -> int:
    rows = []
    for found in folder.all():
        with suppress(FileNotFoundError):  # a run in progress may have removed it
            rows.append(_row(found, folder))
    if as_json:
        _print_json({"path": str(path), "checkpoints": rows})
        return 0
    monitor = next((row["monitor"] for row in reversed(rows) if row["monitor"]), "")
    console = show.console()
    grid = show.table("checkpoint", "epoch", *[monitor] * bool(monitor), "size", "saved", "state", wrap=["state"])
    _align_right(grid, "epoch", monitor, "size")
    for row in rows:
        value = row["metrics"].get(monitor)
        epoch = row["progress"].get("epoch")
        cells = [row["name"], "" if epoch is None else str(epoch)]
        cells += [show.number(value) if isinstance(value, (int, float)) else ""] if monitor else []
        grid.add_row(*cells, format_bytes(row["bytes"]), short_moment(row["saved"]), _state(row))
    console.print(Text.assemble((str(path), "bold"), f"  {counted(len(rows), 'checkpoint')}"), soft_wrap=True)
    console.print()
    console.print(grid)
    return 0


def _row(path: Path, folder: Checkpoints) -> dict[str, Any]:
    """Describe one checkpoint of a run, as far as it can be read."""
    from forge.checkpoint import StoredCheckpoint, captured

    tree, error = {}, None
    try:
        found = StoredCheckpoint(path).outline()
        captured.check(found, str(path), found.keys() & captured.PARTS.keys())
        tree = found
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
    problem = _problem(row["error"] or "", row["path"])
    return Text.assemble((problem, "red") if problem else ("valid", "green"), *(f", {mark}" for mark in row["marks"]))


def _print_checkpoint(checkpoint: StoredCheckpoint, tree: Mapping[str, Any]) -> None:
    from forge.checkpoint import captured
    from forge.checkpoint.checkpoint import averages
    from forge.twin.record import parts

    shown = ("task", "progress", "metrics", "fingerprint", "versions")
    captured.check(tree, str(checkpoint.path), shown)
    console = show.console()
    found = list(_tensors(tree))
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
        "fingerprint": _options(dict(parts(tree["fingerprint"]))),
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
    console.print(Text(f"{counted(len(found), 'tensor')}, {format_bytes(total)}", "dim"))


def _grouped(found: list[tuple[str, TensorInfo]]) -> Table:
    """Show one row for layers that differ only in their number, for one kind of optimizer state, for a plugin."""
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
    _align_right(grid, "count", "size")
    for key, members in groups.items():
        name = members[0][0] if len(members) == 1 else key[0]
        shapes = {str(tensor.shape) for _, tensor in members}
        total = sum(tensor.bytes for _, tensor in members)
        grid.add_row(
            name, str(len(members)), shapes.pop() if len(shapes) == 1 else "several", key[1], format_bytes(total)
        )
    return grid


def _align_right(grid: Table, *columns: str) -> None:
    for column in grid.columns:
        if column.header in columns:
            column.justify = "right"


def _as_json(checkpoint: StoredCheckpoint, tree: Mapping[str, Any]) -> dict[str, Any]:
    from forge.checkpoint.checkpoint import averages

    known = ("progress", "metrics", "task", "fingerprint", "versions", "stack")
    tensors = [
        {"name": name, "shape": list(tensor.shape), "dtype": tensor.dtype, "bytes": tensor.bytes}
        for name, tensor in _tensors(tree)
    ]
    described = {"path": str(checkpoint.path), "valid": True, **{key: tree[key] for key in known}}
    return {**described, "averages": list(averages(tree)), "tensors": tensors}


# -- verify -----------------------------------------------------------------------------------------------------------


def _verify(paths: list[Path]) -> int:
    from forge.checkpoint import StoredCheckpoint

    found: list[Path] = []
    for path in paths:
        folder = _folder(path)
        found += folder.all() if folder is not None else [_find(path).path]
    grid = show.table("checkpoint", "state", wrap=["state"])
    bad = 0
    for path in found:
        try:
            StoredCheckpoint(path).verify()
            state = Text("whole", "green")
        except CheckpointError as error:
            state = Text(_problem(str(error), path), "red")
            bad += 1
        grid.add_row(_run_and_name(path), state)
    console = show.console()
    console.print(grid)
    console.print()
    verified = f"{counted(len(found), 'checkpoint')} verified: "
    console.print(Text(verified + (f"{bad} damaged" if bad else "all whole"), "bold red" if bad else "bold"))
    return 1 if bad else 0


def _problem(error: str, path: Path | str) -> str:
    """Return what is wrong with a checkpoint, whose path stands beside it."""
    return error.replace(f"{path}/", "").replace(f"{path} ", "").rstrip(".")


# -- diff -------------------------------------------------------------------------------------------------------------


def _diff(one: Path, other: Path, as_json: bool) -> int:
    from forge.cli.ckpt_diff import compare

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
        numbers = ", ".join(counted(found["compared"][kind], kind[:-1]) for kind in ("tensors", "values"))
        console.print(Text.assemble(("bit-identical", "bold green"), f": {numbers}"))
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
            distance = "" if row["largest"] is None else f"{row['largest']:.3g}"
            grid.add_row(row["part"], f"{row['differ']} of {row['of']}", distance, Text(row["first"]))
        console.print(grid)
    return 1


# -- export -----------------------------------------------------------------------------------------------------------


def _export(path: Path, out: Path, which: str | None, force: bool) -> int:
    if out.suffix != ".safetensors":
        raise ForgeError(f"{str(out)!r} does not end in .safetensors. Name it {out.stem}.safetensors.")
    if out.exists() and not force:
        raise ForgeError(f"{str(out)!r} exists. Choose another name, or overwrite it with --force.")
    from torch import Tensor

    from forge.checkpoint.weights import read_weights, write_weights
    from forge.snapshot.finite import not_finite, values_of

    weights = read_weights(path, which)
    tensors = {name: value for name, value in weights.tensors.items() if isinstance(value, Tensor)}
    bad = [name for name in not_finite(tensors.items()) if values_of(tensors[name]).isnan().any()]
    if bad and not force:
        raise CheckpointError(f"{path}: {few(bad, 5)} hold NaN. Choose another checkpoint; --force exports it anyway.")
    count = write_weights(weights, out)
    kind = "" if weights.average is None else f", averaged by {weights.average}"
    when = "" if weights.update is None else f" after {counted(weights.update, 'update')}"
    source = weights.path if isinstance(weights.path, str) else show.near(weights.path)
    what = f"{counted(count, 'tensor')}{kind}, {format_bytes(out.stat().st_size)}"
    show.console().print(f"Wrote {out}: {what}, from {source}{when}.", soft_wrap=True)
    return 0


# -- reading and printing ---------------------------------------------------------------------------------------------


def _find(path: Path) -> StoredCheckpoint:
    """Find the checkpoint of a path, and show it by a short one."""
    from forge.checkpoint import StoredCheckpoint

    return StoredCheckpoint(show.near(StoredCheckpoint.find(path).path))


def _tensors(tree: Mapping[str, Any]) -> Iterator[tuple[str, TensorInfo]]:
    """Yield every tensor with its path in the tree; tied tensors under their first name."""
    from forge.checkpoint.checkpoint import TensorInfo
    from forge.twin.record import parts

    seen: set[str] = set()
    for name, value in parts(tree):
        if isinstance(value, TensorInfo) and value.place not in seen:
            seen.add(value.place)
            yield name, value


def _options(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_brief(value)}" for name, value in values.items())


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _run_and_name(path: Path) -> str:
    """Name a checkpoint by its run: RUN/update-00000010."""
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    return f"{run.name}/{path.name}" if run.name else path.name


def _print_json(content: Any) -> None:
    print(json.dumps(_plain(content), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    """Convert to what JSON can hold; numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
