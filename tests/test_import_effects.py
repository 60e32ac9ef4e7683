"""Importing forge changes nothing of Python or torch.

python -m tests.test_import_effects         # imports every module of ours, and prints what that changed
"""

from __future__ import annotations

import ast
import atexit
import faulthandler
import gc
import importlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import types
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
FOLDERS = [REPO / "forge", *sorted((REPO / "plugins").glob("forge_*")), *sorted((REPO / "recipes").glob("forge_*"))]
PATCHABLE = ("builtins", "collections", "copy", "logging", "multiprocessing", "os", "pickle", "random", "signal")
PATCHABLE += ("threading", "warnings", "numpy", "torch")
"""Packages whose modules, and whose classes, somebody might patch."""


def modules() -> list[str]:
    """Every module of every package of ours, by its dotted name."""
    names = []
    for folder in FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            if parts[-1] != "__main__":
                names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def functions(loaded: dict[str, types.ModuleType]) -> dict[str, Any]:
    """The functions and classes of modules, and the members of classes, by their names."""
    found: dict[str, Any] = {}
    for name, module in loaded.items():
        for key, value in list(vars(module).items()):
            if callable(value):
                found[f"{name}.{key}"] = value
            if type(value) is type and value.__module__ == name:
                found |= {f"{name}.{key}.{member}": content for member, content in vars(value).items()}
    return found


def of_others() -> list[str]:
    """What our modules import of others at their top."""
    names: dict[str, None] = {}
    for path in (path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names |= {alias.name: None for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}{part}": None for part in ("", *(f".{alias.name}" for alias in node.names))}
    return [name for name in names if not name.startswith("forge")]


def snapshot(value: Any) -> Any:
    return [*value] if isinstance(value, list) else value


def shared() -> dict[str, Any]:
    """What a whole process shares: hooks, flags, registries, modes and random numbers."""
    import numpy as np
    import torch
    from torch.utils import _pytree
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    hooks = ("meta_path", "path_hooks", "path", "excepthook", "unraisablehook", "displayhook", "stdout", "stderr")
    flags = ("get_default_dtype", "get_default_device", "get_num_threads", "is_grad_enabled", "is_anomaly_enabled")
    flags += ("are_deterministic_algorithms_enabled", "get_float32_matmul_precision", "is_warn_always_enabled")
    cudnn: Any = torch.backends.cudnn
    loggers = (logging.getLogger(), logging.getLogger("forge"))
    return {
        **{f"sys.{name}": snapshot(getattr(sys, name)) for name in hooks},
        **{f"torch.{name}()": getattr(torch, name)() for name in flags},
        "backends": [cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32],
        "autocast": [torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")],
        "os.environ": dict(os.environ),
        "os.getcwd()": os.getcwd(),
        "warnings.filters": [*warnings.filters],
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "tracing": [sys.gettrace(), sys.getprofile(), sys.getrecursionlimit(), faulthandler.is_enabled()],
        "atexit": atexit._ncallbacks(),  # pyright: ignore[reportAttributeAccessIssue]
        "gc": [*gc.callbacks, gc.get_threshold(), gc.isenabled()],
        "threads": threading.enumerate(),
        "loggers": [[each.level, *each.handlers, *each.filters, each.propagate] for each in loggers],
        "modes": [torch._C._len_torch_function_stack(), len(_get_current_dispatch_mode_stack())],
        "safe globals": torch.serialization.get_safe_globals(),
        "nodes of trees": [kind for kind in _pytree.SUPPORTED_NODES if kind.__module__.startswith("forge")],
        "numbers": [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()],  # type: ignore[index]
    }


def main() -> None:
    for name in of_others():
        with suppress(ImportError):
            importlib.import_module(name)
    loaded = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in PATCHABLE}
    before, members = shared(), functions(loaded)
    for name in modules():
        importlib.import_module(name)
    after, now = shared(), functions(loaded)
    changed = [name for name, value in after.items() if value != before[name]]
    print(json.dumps(changed + [name for name in now if name in members and now[name] is not members[name]]))


def test_importing_every_module_changes_nothing(tmp_path: Path) -> None:
    assert len(modules()) > 300
    paths = os.pathsep.join([str(REPO), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.test_import_effects"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


if __name__ == "__main__":
    main()
