"""Write docs/findings.md, every finding of `forge doctor`, and docs/findings/, a page for each with an example.

    python docs/make_findings.py

The examples are the planted bugs of benchmarks/doctor; tests/docs/test_findings.py fails when a page is out of date.
"""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from benchmarks.doctor.changes import HERE, Change, changes  # noqa: E402
from forge_doctor.findings import FINDINGS, LEVELS  # noqa: E402

SHOWN = 3
"""Examples on the page of a finding."""
INTRODUCTION = """\
# Findings of forge doctor

`forge doctor RECIPE` and `forge doctor FILE.py:Task` examine a task, its loss, its data, its optimizer and its schedule
for mistakes that raise no error. Every fit looks at its first steps in the same way, as far as that costs nothing, and
warns. Each finding has a name that stays, a level, the evidence in numbers, a cure, and a page with an example. These
pages are generated from `plugins/forge_doctor/findings.py` and from the planted bugs in `benchmarks/doctor/bugs.diff`.
[Debugging](debugging.md#ask-the-doctor) shows how to use the doctor.

- An **error** cannot be meant. `forge doctor` exits with 1.
- A **warning** is nearly always wrong.
- A **note** is worth a look.

A finding that is meant is silenced by name on the task, and the report says so:

```python
import forge


class Contrastive(forge.TaskModule):
    expected = {"batch_dependence"}
```
"""
TITLES = {"error": "## Errors", "warning": "## Warnings", "note": "## Notes"}
BUG_TABLE = """\
## Planted bugs and their findings

The planted bugs of `benchmarks/doctor/bugs.diff`: what `forge doctor` calls them, and what a plain fit with the recipe
`default` says.

| bug | forge doctor | a plain fit |
|---|---|---|
"""


Found = dict[str, dict[str, dict[str, str]]]


def pages() -> dict[str, str]:
    """Every page by its path in docs."""
    found: Found = json.loads((HERE / "FOUND.json").read_text())
    bugs = changes("bugs")
    made = {"findings.md": _overview(found, bugs)}
    for name in FINDINGS:
        examples = [bug for key, bug in bugs.items() if name in found.get(key, {}).get("doctor", {})]
        made[f"findings/{name}.md"] = _page(name, examples[:SHOWN], found)
    return made


def _overview(found: Found, bugs: dict[str, Change]) -> str:
    parts = [INTRODUCTION]
    for level in LEVELS:
        names = [name for name, (own, _) in sorted(FINDINGS.items()) if own == level]
        rows = [f"| [`{name}`](findings/{name}.md) | {FINDINGS[name][1]} |" for name in names]
        parts.append("\n".join([TITLES[level], "", "| finding | cure |", "|---|---|", *rows, ""]))
    rows = []
    for key, bug in sorted(bugs.items()):
        told = found.get(key, {})
        names = [", ".join(f"`{name}`" for name in sorted(told.get(how, {}))) for how in ("doctor", "fit")]
        rows.append(f"| {bug.sentence} | {names[0] or 'nothing'} | {names[1]} |")
    return "\n".join([*parts, BUG_TABLE + "\n".join(rows), ""])


def _page(name: str, examples: list[Change], found: Found) -> str:
    level, cure = FINDINGS[name]
    parts = [f"# {name}", f"**{level.capitalize()}.** {cure}"]
    for bug in examples:
        parts += [
            f"## Example: {bug.name.replace('_', ' ')}",
            bug.sentence,
            f"`forge doctor` says: {_said(found[bug.name]['doctor'][name])}",
        ]
        if name in found[bug.name].get("fit", {}):
            parts.append("A plain fit warns of it too.")
        base = f"[{bug.base}.py](../../benchmarks/doctor/bases/{bug.base}.py)"
        if bug.places:
            parts += [f"The mistake is this change of a healthy program, {base}:", f"```diff\n{_diff(bug)}\n```"]
        if bug.recipe:
            lines = "\n".join(bug.recipe)
            parts.append(f"{base} is healthy; the recipe is" if not bug.places else "The recipe:")
            parts.append(f"```yaml\n{lines}\n```")
        parts.append(f"Try it: `python -m benchmarks.doctor bugs --only {bug.name}`")
    parts.append(f'If it is meant, write `expected = {{"{name}"}}` on the task. [All findings](../findings.md)')
    return "\n\n".join(parts) + "\n"


def _diff(bug: Change) -> str:
    """The change with the lines around it."""
    healthy = (HERE / "bases" / f"{bug.base}.py").read_text().splitlines()
    return "\n".join(list(difflib.unified_diff(healthy, bug.program().splitlines(), n=3, lineterm=""))[2:])


def _said(text: str) -> str:
    text = " ".join(text.split())
    return f"*{text}*" if "*" not in text and "_" not in text else f"`{text.replace('`', '')}`"


def main() -> None:
    made = pages()
    for path in (DOCS / "findings").glob("*.md"):
        if f"findings/{path.name}" not in made:
            path.unlink()
    for name, text in made.items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(text)


if __name__ == "__main__":
    main()
