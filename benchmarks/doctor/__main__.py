"""Examine every planted bug and every healthy program, and count what is found and what is a false alarm.

    python -m benchmarks.doctor [bugs] [healthy] [bases] [--fit] [--cuda] [--jobs N] [--only NAME ...]
        [--out FILE] [--record] [--write FOLDER]

A bug is a small change of a healthy program: `bugs.diff` holds the changes and the findings that are right for
each (`changes.py` says how); those that are worth a note (`note:NAME`) are counted apart. `bases/` has the
programs, and `healthy.diff` has healthy changes of them: there, every error and warning is a false alarm.
`--fit` counts what a plain fit with the recipe `default` says instead.
Results are appended to FILE (runs/doctor.jsonl), and a second call goes on where the first was interrupted. Calls with
the same FILE and `--only` examine these anew, and add to what is recorded.
All run on the CPU, or with `--cuda` on a GPU, each then in a process of its own.
`--record` writes what was found of the bugs to `FOUND.json`, from which docs/make_findings.py makes the gallery.
`--write` examines nothing: it writes the programs into a folder, for `forge doctor FOLDER/NAME.py:Task`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.doctor.cases import items, one
from benchmarks.doctor.changes import HERE, changes, written

HEALTHY = ("healthy", "bases")
"""Sets without bugs."""


def main() -> None:
    args = parsed()
    if args.write:
        write(items(args.sets, args.only), Path(args.write))
        return
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    how = "fit" if args.fit else "doctor"
    done = set() if args.only else {(row["name"], row["how"]) for row in rows(out)}
    todo = [item for item in items(args.sets, args.only) if (f"{item[0]}/{item[1]}", how) not in done]
    environment = {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    if not args.cuda:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update(environment)
    # CUDA does not survive a fork; tasks of these files cannot be sent to workers that are spawned
    context, most = (get_context("spawn"), 1) if args.cuda else (get_context("fork"), None)
    with ProcessPoolExecutor(args.jobs, context, max_tasks_per_child=most) as pool, out.open("a") as file:
        waiting = [pool.submit(one, kind, name, how) for kind, name in todo]
        for future in as_completed(waiting):
            row = future.result()
            print(json.dumps(row), file=file, flush=True)
            shown = ", ".join(f"{level} {finding}" for level, finding, _ in row["findings"]) or "nothing"
            print(f"{row['name']}: {row['error'] or shown}", flush=True)
    found = [row for row in rows(out) if row["how"] == how]
    report(found, args.sets, args.only)
    if args.record:
        record(found, how)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sets", nargs="*", help="bugs, healthy, bases (all of them)")
    parser.add_argument("--fit", action="store_true", help="what a plain fit says, in place of forge doctor")
    parser.add_argument("--cuda", action="store_true", help="run on a GPU")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="*", default=[], help="names")
    parser.add_argument("--out", default="runs/doctor.jsonl")
    parser.add_argument("--record", action="store_true", help="write FOUND.json")
    parser.add_argument("--write", metavar="FOLDER", help="write the programs, and examine nothing")
    args = parser.parse_args()
    args.sets = args.sets or ["bugs", "healthy", "bases"]
    return args


def write(todo: list[tuple[str, str]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for change in (changes(kind)[name] for kind, name in todo if kind != "bases" and name in changes(kind)):
        path = written(change, folder)
        planned = f" --recipe {path.with_suffix('.yaml')}" if change.recipe else ""
        print(f"forge doctor {path}:Task{planned}")


def rows(path: Path) -> list[dict[str, Any]]:
    """The last result of each."""
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return list({(row["name"], row["how"]): row for row in found}.values())


def record(found: list[dict[str, Any]], how: str) -> None:
    """Write the right findings of each bug, with their messages, beside those of the other way."""
    path = HERE / "FOUND.json"
    known: dict[str, dict[str, dict[str, str]]] = json.loads(path.read_text()) if path.is_file() else {}
    right = expected("bugs")
    for row in found:
        kind, _, name = row["name"].partition("/")
        if kind == "bugs":
            told = {finding: text for finding, text in loud(row, kind).items() if finding in right.get(name, set())}
            file = re.compile(rf"/\S*?/{name}\.py")
            known.setdefault(name, {})[how] = {key: file.sub(f"{name}.py", text) for key, text in told.items()}
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


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


def report(results: list[dict[str, Any]], sets: list[str], only: list[str]) -> None:
    for kind in sets:
        mine = [row for row in results if row["name"].startswith(f"{kind}/")]
        mine = [row for row in mine if not only or row["name"].partition("/")[2] in only]
        if mine:
            print()
            (_report_healthy if kind in HEALTHY else _report_bugs)(kind, mine)


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
