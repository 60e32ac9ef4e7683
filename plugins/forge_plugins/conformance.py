"""Check every plugin of a package by the conformance kit; write the result as JSON, and a badge."""

from __future__ import annotations

import json
import logging
import platform
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Collection
from pathlib import Path
from typing import Any

from forge import registry
from forge.errors import ForgeError, did_you_mean
from forge.util import show
from forge.util.files import atomic_write
from forge.version import __version__

GROUP = "extend"
FORMAT = {"format": "forge-conformance", "version": 1}
RESULT, BADGE = "conformance.json", "badge.json"
EXAMPLES = f"""\
examples:
  forge plugins check forge-weight-norm                    all plugins of an installed package
  forge plugins check forge-weight-norm --out docs         write docs/{RESULT} and docs/{BADGE}
  forge plugins check forge-weight-norm --leave-out order  faster: not beside other plugins

Plugins are made with the options that their class declares in `example`, or with none. Exit code 0: all keep the
contract; 1: one does not.
"""


def parser() -> ArgumentParser:
    parser = show.new_parser("plugins check", "Check every plugin of a package by the conformance kit.", EXAMPLES)
    parser.add_argument("package", metavar="PACKAGE", help="the name of an installed package, as pip knows it")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the results (default: this one)")
    parser.add_argument(
        "--leave-out", metavar="NAME", action="append", default=[], help="a check or a situation; may be repeated"
    )
    return parser


def run(args: Namespace) -> int:
    result = check_package(args.package, args.leave_out)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, content in {RESULT: result, BADGE: badge(result)}.items():
        with atomic_write(args.out / name) as beside:
            beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    grid = show.table("plugin", "keeps the contract", wrap=["keeps the contract"])
    for name, found in result["plugins"].items():
        grid.add_row(name, found["problem"] or f"yes: {', '.join(found['checked'])}")
    console = show.console()
    console.print(grid)
    console.print(f"Wrote {args.out / RESULT} and {args.out / BADGE}.", soft_wrap=True)
    return 0 if result["keeps"] else 1


def check_package(package: str, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """Return what the kit says of every plugin of an installed package, as plain data."""
    import torch

    by_package: dict[str, dict[str, Any]] = {}
    for name, entry in registry.installed("plugin").items():
        if entry.dist is not None:
            by_package.setdefault(_canonical(entry.dist.name), {})[name] = entry
    entries = by_package.get(_canonical(package))
    if entries is None:
        raise ForgeError(f"No installed package {package!r} has a plugin.{did_you_mean(package, by_package)}")
    plugins = {name: _checked(name, leave_out) for name in entries}
    (version,) = {entry.dist.version for entry in entries.values()}
    return {
        **FORMAT,
        "package": _canonical(package),
        "package_version": version,
        "versions": {"forge": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "keeps": all(not found["problem"] for found in plugins.values()),
        "left_out": sorted(leave_out),
        "plugins": plugins,
    }


def badge(result: dict[str, Any]) -> dict[str, Any]:
    """Return the badge, for https://shields.io/badges/endpoint-badge."""
    kept, words = result["keeps"], f"{result['versions']['forge']}, {len(result['plugins'])} plugins"
    words = words.removesuffix("s") if len(result["plugins"]) == 1 else words
    message = f"keeps the contract of {words}" if kept else f"breaks the contract of {words}"
    return {"schemaVersion": 1, "label": "forge", "message": message, "color": "brightgreen" if kept else "red"}


def _checked(name: str, leave_out: Collection[str]) -> dict[str, Any]:
    from forge.testing import check_plugin

    found: dict[str, Any] = {"checked": [], "problem": ""}
    logging.disable(logging.WARNING)  # of the kit's own small fits
    try:
        kind = registry.load("plugin", name)
        checked = check_plugin(lambda: kind(**(kind.example or {})), leave_out=leave_out)
    except (AssertionError, ForgeError) as error:
        return {**found, "problem": str(error).strip() or type(error).__name__}
    finally:
        logging.disable(logging.NOTSET)
    return {**found, "checked": list(checked)}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
