"""Write docs/conformance.md: the packages whose plugins keep the contract, by what `forge plugins check` wrote of each.

    forge plugins check PACKAGE --out FOLDER      # FOLDER/conformance.json goes to docs/conformance/PACKAGE.json
    python docs/make_conformance.py

tests/docs/test_pages.py fails when the page is out of date.
"""

from __future__ import annotations

import json
from pathlib import Path

PAGE = Path(__file__).parent / "conformance.md"
RESULTS = Path(__file__).parent / "conformance"
INTRODUCTION = """\
# Conformance of packages

A plugin of another package stands beside forge's own in every stack. The conformance kit trains small tasks with it and
compares: it leaks nothing, resumes exactly, changes nothing where it promises so, writes only where it may, survives
errors, and does not depend on its place ([what is checked](writing-plugins.md#testing-a-plugin)). One command runs it
on every plugin of an installed package:

```console
$ forge plugins check forge-demo --out build
```

It prints a table, exits with 1 if a plugin breaks the contract, and writes two files:

- `build/conformance.json`: the versions of forge, torch and Python, and for each plugin the checks that it passed, or
  what is wrong.
- `build/badge.json`, for an [endpoint badge of shields.io](https://shields.io/badges/endpoint-badge). Publish it, for
  instance on the branch of your pages, and put `https://img.shields.io/endpoint?url=ADDRESS` into your README.

A plugin is made with the options that its class declares in `example`, so that it acts within seven updates, or with
none. `--leave-out "a fit with two optimizers"` leaves out what a plugin refuses on purpose; the JSON says so. The
workflow that `forge new plugin` writes does all of this on every change.

## Packages

To have a package listed, send its `conformance.json` as `docs/conformance/PACKAGE.json`. A row is what its author's
machine found, with these versions."""


def page() -> str:
    """Return the whole page."""
    rows = ["| package | plugin | keeps the contract | left out | forge | torch |", "|---|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        package = f"`{result['package']}` {result['package_version']}"
        left, versions = ", ".join(result["left_out"]) or "–", result["versions"]
        for name, found in result["plugins"].items():
            kept = " ".join(found["problem"].split()) or f"yes: {', '.join(found['checked'])}"
            kept = kept.replace("|", "\\|")
            rows.append(f"| {package} | `{name}` | {kept} | {left} | {versions['forge']} | {versions['torch']} |")
    return "\n\n".join([INTRODUCTION, "\n".join(rows)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
