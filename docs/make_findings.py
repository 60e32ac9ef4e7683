"""Write docs/findings.md, every finding of `forge doctor`, and docs/findings/, a page for each with an example.

    python docs/make_findings.py

The examples are the planted bugs of benchmarks/doctor; tests/docs/test_findings.py fails when a page is out of date.
"""

from __future__ import annotations

import json
from pathlib import Path

from forge_doctor.findings import FINDINGS, LEVELS

DOCS = Path(__file__).parent
BUGS = DOCS.parent / "benchmarks" / "doctor" / "bugs"
SHOWN = 3
"""Examples on the page of a finding."""
INTRODUCTION = """\
# Findings of forge doctor

`forge doctor RECIPE` and `forge doctor FILE.py:Task` examine a task, its loss, its data, its optimizer and its schedule
for mistakes that raise no error. Every fit looks at its first steps in the same way, as far as that costs nothing, and
warns. Each finding has a name that stays, a level, the evidence in numbers, a cure, and a page with an example. These
pages are generated from `plugins/forge_doctor/findings.py` and from the planted bugs in `benchmarks/doctor/bugs`.
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

The planted bugs of `benchmarks/doctor/bugs`: what `forge doctor` calls them, and what a plain fit with the recipe
`default` says.

| bug | forge doctor | a plain fit |
|---|---|---|
"""


def pages() -> dict[str, str]:
    """Every page by its path in docs."""
    found = json.loads((BUGS / "FOUND.json").read_text())
    sentences = {line.split("\t")[0]: line.split("\t")[2] for line in _expected()}
    made = {"findings.md": _overview(found, sentences)}
    for name in FINDINGS:
        examples = [bug for bug in sentences if name in found.get(bug, {}).get("doctor", {})]
        made[f"findings/{name}.md"] = _page(name, examples[:SHOWN], found, sentences)
    return made


def _expected() -> list[str]:
    return [line for line in (BUGS / "EXPECTED.tsv").read_text().splitlines() if "\t" in line]


def _overview(found: dict[str, dict[str, dict[str, str]]], sentences: dict[str, str]) -> str:
    parts = [INTRODUCTION]
    for level in LEVELS:
        names = [name for name, (own, _) in sorted(FINDINGS.items()) if own == level]
        rows = [f"| [`{name}`](findings/{name}.md) | {FINDINGS[name][1]} |" for name in names]
        parts.append("\n".join([TITLES[level], "", "| finding | cure |", "|---|---|", *rows, ""]))
    rows = []
    for bug, sentence in sorted(sentences.items()):
        told = found.get(bug, {})
        names = [", ".join(f"`{name}`" for name in sorted(told.get(how, {}))) for how in ("doctor", "fit")]
        rows.append(f"| {sentence} | {names[0] or 'nothing'} | {names[1]} |")
    return "\n".join([*parts, BUG_TABLE + "\n".join(rows), ""])


def _page(
    name: str, examples: list[str], found: dict[str, dict[str, dict[str, str]]], sentences: dict[str, str]
) -> str:
    level, cure = FINDINGS[name]
    parts = [f"# {name}", f"**{level.capitalize()}.** {cure}"]
    for bug in examples:
        parts += [
            f"## Example: {bug.replace('_', ' ')}",
            sentences[bug],
            f"`forge doctor` says: {_said(found, bug, name)}",
        ]
        if name in found[bug].get("fit", {}):
            parts.append("A plain fit warns of it too.")
        parts.append(f"```python\n{(BUGS / f'{bug}.py').read_text().strip()}\n```")
        recipe = BUGS / f"{bug}.yaml"
        if recipe.is_file():
            parts.append(f"`{bug}.yaml`:\n\n```yaml\n{recipe.read_text().strip()}\n```")
        planned = f" --recipe benchmarks/doctor/bugs/{bug}.yaml" if recipe.is_file() else ""
        parts.append(f"Try it: `forge doctor benchmarks/doctor/bugs/{bug}.py:Task{planned}`")
    parts.append(f'If it is meant, write `expected = {{"{name}"}}` on the task. [All findings](../findings.md)')
    return "\n\n".join(parts) + "\n"


def _said(found: dict[str, dict[str, dict[str, str]]], bug: str, name: str) -> str:
    text = " ".join(found[bug]["doctor"][name].split())
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
