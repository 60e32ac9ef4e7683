"""Write docs/findings.md: every finding of `forge doctor` with its level and cure.

    python docs/make_findings.py

tests/docs/test_findings.py fails when the page is out of date.
"""

from __future__ import annotations

from pathlib import Path

from forge.diagnose.findings import FINDINGS, LEVELS

PAGE = Path(__file__).parent / "findings.md"
INTRODUCTION = """\
# Findings of forge doctor

`forge doctor RECIPE` and `forge doctor FILE.py:Task` examine a task, its loss, its data, its optimizer and its schedule
for mistakes that raise no error. Each finding has a name that stays, a level, the evidence in numbers, and a cure. This
page is generated from `forge/diagnose/findings.py`. [Debugging](debugging.md#ask-the-doctor) shows how to use it.

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


def page() -> str:
    parts = [INTRODUCTION]
    for level in LEVELS:
        rows = [f"| `{name}` | {cure} |" for name, (own, cure) in sorted(FINDINGS.items()) if own == level]
        parts.append("\n".join([TITLES[level], "", "| finding | cure |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
