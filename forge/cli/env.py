"""`forge env`: versions, devices, what is installed, and which private names of torch are missing."""

from __future__ import annotations

import json
import os
import platform
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Any

from forge import registry
from forge.torch_internals import Internal
from forge.util import show
from forge.util.text import format_bytes
from forge.version import __version__

DISTRIBUTION = "forge-trainer"
EXAMPLES = """\
examples:
  forge env            what to copy into a bug report
  forge env --json     the same for a program
"""


def parser() -> ArgumentParser:
    parser = show.new_parser("env", "Print versions, devices and what is installed, for bug reports.", EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(args: Namespace) -> int:
    found = environment()
    print(json.dumps(found, indent=1) if args.json else "\n".join(_lines(found)))
    return 0


def environment() -> dict[str, Any]:
    """Return everything that `forge env` prints."""
    import torch

    around = registry.packages()
    return {
        "forge": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "devices": _devices(torch),
        "threads": {
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "torch": torch.get_num_threads(),
            "torch_interop": torch.get_num_interop_threads(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        },
        "packages": {name: _version(name) for name in around},
        "libraries": {name: _version(name) for name in _libraries([DISTRIBUTION, *around])},
        "internals": [_looked_up(package, internal) for package, internal in seams()],
    }


def seams() -> Iterator[tuple[str, Internal]]:
    """Yield the private names of torch that forge and each installed package list in their `torch_internals`."""
    for package in sorted(registry.libraries()):
        if find_spec(package) is not None and find_spec(f"{package}.torch_internals") is not None:
            names: Mapping[str, Internal] = import_module(f"{package}.torch_internals").NAMES
            yield from ((package, internal) for internal in names.values())


def _looked_up(package: str, internal: Internal) -> dict[str, Any]:
    return {
        "package": package,
        "name": internal.path,
        "missing": internal.lacking(),
        "why": internal.why,
        "without": internal.without,
        "since": internal.since,
    }


def _devices(torch: Any) -> list[str]:
    found = [f"cpu: {platform.processor() or platform.machine()}"]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index}: {device.name}, {format_bytes(device.total_memory)}")
    if not torch.cuda.device_count() and torch.accelerator.is_available():
        found.append(f"{torch.accelerator.device_count()} of {torch.accelerator.current_accelerator()}")
    return found


def _libraries(distributions: list[str]) -> list[str]:
    """Return what these distributions ask for, with and without extras; not themselves."""
    asked = [line for name in distributions if _version(name) for line in requires(name) or ()]
    names = {re.match(r"[\w.-]+", line)[0] for line in asked}  # pyright: ignore[reportOptionalSubscript]
    return sorted(names - {*distributions}, key=str.lower)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    threads = ", ".join(f"{name} {number}" for name, number in found["threads"].items() if number is not None)
    yield f"forge      {found['forge']}, Python {found['python']}, {found['platform']}"
    yield f"torch      {found['torch']}, CUDA {found['cuda'] or 'none'}, cuDNN {found['cudnn'] or 'none'}"
    yield f"threads    {threads}"
    yield from (f"device     {device}" for device in found["devices"])
    for title in ("packages", "libraries"):
        versions = found[title]
        yield _wrapped(title, ", ".join(f"{name} {number}" for name, number in versions.items() if number) or "none")
        absent = [name for name, number in versions.items() if not number]
        if absent:
            yield _wrapped("", f"not installed: {', '.join(absent)}")
    missing = [entry for entry in found["internals"] if entry["missing"]]
    yield f"internals  {len(found['internals'])} private names of torch are used, and {len(missing) or 'none'} missing"
    for entry in missing:
        use = f"{entry['package']} uses it to {entry['why']}. {entry['without']}"
        yield _wrapped("", f"{', '.join(entry['missing'])}: {use}")


def _wrapped(title: str, text: str) -> str:
    return show.wrapped(f"{title:<11}{text}", show.console().width, 11)
