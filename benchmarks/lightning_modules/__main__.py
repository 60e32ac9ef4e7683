"""Compare LightningModules of other packages under both Trainers, each in a virtual environment of its own::

    python -m benchmarks.lightning_modules                  # all; those with a recorded outcome are not run again
    python -m benchmarks.lightning_modules --again tft      # run these again
    python -m benchmarks.lightning_modules --json

Environments and outcomes are kept below FORGE_LIGHTNING_PLACES (default ~/.cache/forge/lightning_modules). Nothing is
downloaded but packages: data is drawn, and networks have no pretrained weights.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.lightning_modules.modules import cases
from benchmarks.lightning_modules.places import HOME, ROOT


def outcome(name: str, again: bool) -> dict[str, Any]:
    """Return the recorded outcome of a module, or run it and record it."""
    file = HOME / "outcomes" / f"{name}.json"
    if file.exists() and not again:
        return json.loads(file.read_text())
    package = sys.modules[cases()[name].__module__].PACKAGE
    try:
        python = package.install()
        command = [str(python), "-m", "benchmarks.lightning_modules.compare", name]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
        line = next((line for line in done.stdout.splitlines() if line.startswith("OUTCOME ")), None)
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        found = {"name": name, "error": last[-300:]} if line is None else json.loads(line.removeprefix("OUTCOME "))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        found = {"name": name, "error": str(error)[-300:]}
    found |= {"package": package.title, "version": package.version()}
    if "error" not in found:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    return found


def verdict(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"error: {found['error']}"
    if found["lightning_again"]:
        return f"Lightning itself differs between two runs, in {found['lightning_again']} tensors"
    if not found["trained"]:
        return "nothing was trained"
    return "equal" if not found["unequal"] else f"{found['unequal']} unequal, by up to {found['largest']:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--again", action="store_true", help="run modules that have an outcome too")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    names = arguments.names or list(cases())
    found = []
    for name in names:
        found.append(outcome(name, arguments.again))
        if not arguments.json:
            one = found[-1]
            what = f"{one['package']} {one['version']}"
            print(f"| {what} | {one.get('class', name)} | {one.get('updates', '')} | {verdict(one)} |", flush=True)
    equal = [one for one in found if verdict(one) == "equal"]
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    packages = {one["package"] for one in equal}
    torch, lightning = importlib.metadata.version("torch"), importlib.metadata.version("lightning")
    print(f"\n{len(equal)} of {len(found)} equal, of {len(packages)} packages; torch {torch}, Lightning {lightning}")


if __name__ == "__main__":
    main()
