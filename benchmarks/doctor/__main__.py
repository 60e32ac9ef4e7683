"""Examine every planted bug and every healthy program, and count what is found and what is a false alarm.

    python -m benchmarks.doctor [bugs] [bases] [--fit] [--jobs N] [--only NAME ...] [--write FOLDER]

A bug is a small change of a healthy program: `bugs.diff` holds the changes and the findings that are right for
each (`changes.py` says how); those that are worth a note (`note:NAME`) are counted apart. `bases/` has the healthy
programs: there, every error and warning is a false alarm. `--fit` counts what a plain fit with the recipe `default`
says instead. All run on the CPU.
`--write` examines nothing: it writes the programs into a folder, for `forge doctor FOLDER/NAME.py:Task`.
"""

from __future__ import annotations

import argparse
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.doctor.cases import items, one
from benchmarks.doctor.changes import changes, written


def main() -> None:
    args = parsed()
    todo = items(args.sets, args.only)
    if args.write:
        write(todo, Path(args.write))
        return
    os.environ.update(OMP_NUM_THREADS="1", COLUMNS="120", CUDA_VISIBLE_DEVICES="")
    found: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.jobs, get_context("fork")) as pool:
        for row in pool.map(one, *zip(*todo, strict=True), ["fit" if args.fit else "doctor"] * len(todo)):
            found.append(row)
            shown = ", ".join(f"{level} {finding}" for level, finding, _ in row["findings"]) or "nothing"
            print(f"{row['name']}: {row['error'] or shown}", flush=True)
    report(found, args.sets)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sets", nargs="*", help="bugs, bases (both)")
    parser.add_argument("--fit", action="store_true", help="what a plain fit says, in place of forge doctor")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="*", default=[], help="names")
    parser.add_argument("--write", metavar="FOLDER", help="write the programs, and examine nothing")
    args = parser.parse_args()
    args.sets = args.sets or ["bugs", "bases"]
    return args


def write(todo: list[tuple[str, str]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for change in (changes(kind)[name] for kind, name in todo if kind != "bases"):
        path = written(change, folder)
        planned = f" --recipe {path.with_suffix('.yaml')}" if change.recipe else ""
        print(f"forge doctor {path}:Task{planned}")


def loud(row: dict[str, Any], kind: str) -> dict[str, str]:
    """What was found by an error or a warning, and the notes that are right for a bug that is worth a note."""
    mild = notes(kind).get(row["name"].partition("/")[2], set())
    return {finding: text for level, finding, text in row["findings"] if level != "note" or finding in mild}


# ---------------------------------------------------------------------------------------------------------------------
# The table


def expected(kind: str) -> dict[str, set[str]]:
    """The findings that are right for each bug."""
    return {name: {x.removeprefix("note:") for x in change.findings} for name, change in changes(kind).items()}


def notes(kind: str) -> dict[str, set[str]]:
    """The bugs that are worth a note only, and their findings."""
    noted = {name: [x for x in change.findings if x.startswith("note:")] for name, change in changes(kind).items()}
    return {name: {x.removeprefix("note:") for x in found} for name, found in noted.items() if found}


def report(results: list[dict[str, Any]], sets: list[str]) -> None:
    for kind in sets:
        mine = [row for row in results if row["name"].startswith(f"{kind}/")]
        if mine:
            print()
            (_report_healthy if kind == "bases" else _report_bugs)(kind, mine)


def _report_bugs(kind: str, results: list[dict[str, Any]]) -> None:
    """Count bugs; those whose right finding is a note are counted apart."""
    right = expected(kind)
    by_name = {row["name"].partition("/")[2]: row for row in results}
    mild = by_name.keys() & notes(kind).keys()
    for what, names in ((kind, by_name.keys() - mild), (f"{kind} that are worth a note", mild)):
        missed = [name for name in sorted(names) if not right.get(name, set()) & loud(by_name[name], kind).keys()]
        if names:
            found = len(names) - len(missed)
            print(f"{what}: {found} of {len(names)} found by a right name ({found / len(names):.1%})")
        for name in missed:
            told = ", ".join(sorted(loud(by_name[name], kind))) or by_name[name]["error"] or "nothing"
            print(f"  {name}: found {told}; right {', '.join(sorted(right.get(name, [])))}")


def _report_healthy(kind: str, results: list[dict[str, Any]]) -> None:
    by_level = {
        level: [sum(found[0] == level for found in row["findings"]) for row in results]
        for level in ("error", "warning", "note")
    }
    alarmed = sum(bool(row["error"]) or any(found[0] != "note" for found in row["findings"]) for row in results)
    print(
        f"{kind}: {len(results)} healthy programs; errors on {sum(map(bool, by_level['error']))}, warnings on "
        f"{sum(map(bool, by_level['warning']))}, quiet {1 - alarmed / len(results):.1%}; notes: median "
        f"{statistics.median(by_level['note']):g}, most {max(by_level['note'])}"
    )
    for row in sorted(results, key=lambda row: row["name"]):
        loud = [f"{level} {finding}: {text[:150]}" for level, finding, text in row["findings"] if level != "note"]
        if loud or row["error"]:
            print(f"  {row['name']}: {row['error']}{'; '.join(loud)}")


if __name__ == "__main__":
    main()
