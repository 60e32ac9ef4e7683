"""Write docs/findings.md: a paragraph on every finding of `forge doctor`, with a planted bug as its example.

    python docs/make_findings.py

The examples are those of benchmarks/doctor; tests/docs/test_findings.py fails when the page is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from benchmarks.doctor.changes import changes  # noqa: E402
from forge_doctor.findings import FINDINGS, LEVELS  # noqa: E402

INTRODUCTION = """\
# Findings of forge doctor

`forge doctor RECIPE` and `forge doctor FILE.py:Task` examine a task, its loss, its data, its optimizer and its schedule
for mistakes that raise no error. Every fit looks at its first steps in the same way, as far as they show it by
themselves, and warns. Each finding has a name that stays, a level, the evidence in numbers and a cure. This page is
generated from `plugins/forge_doctor/findings.py`, and its examples from the planted bugs in
`benchmarks/doctor/bugs.diff`. [Debugging](debugging.md#ask-the-doctor) shows how to use the doctor.

- An **error** cannot be meant. `forge doctor` exits with 1.
- A **warning** is nearly always wrong.
- A **note** is worth a look.

A finding that is meant is silenced by name on the task, and the report says so:

```python
import forge


class Contrastive(forge.TaskModule):
    expected = {"batch_dependence"}
```

An example can be tried: `python -m benchmarks.doctor bugs --only NAME`.
"""
TITLES = {"error": "## Errors", "warning": "## Warnings", "note": "## Notes"}


def page() -> str:
    """The page: an introduction, and a paragraph on each finding, by level and name."""
    parts = [INTRODUCTION]
    for level in LEVELS:
        names = [name for name, (own, _) in sorted(FINDINGS.items()) if own == level]
        parts += [f"{TITLES[level]}\n", *map(paragraph, names)]
    return "\n".join(parts)


def paragraph(name: str) -> str:
    """What to do about a finding, and the first planted bug that is one."""
    bugs = [bug for bug in changes("bugs").values() if name in {kind.removeprefix("note:") for kind in bug.findings}]
    example = f" Example, `{bugs[0].name}`: {bugs[0].sentence}" if bugs else ""
    return f"### {name}\n\n{FINDINGS[name][1]}{example}\n"


if __name__ == "__main__":
    (DOCS / "findings.md").write_text(page())
