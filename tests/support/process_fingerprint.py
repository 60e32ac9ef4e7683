"""A fingerprint of what a whole process shares: Python's hooks, torch's classes, registries, flags and modes.

Values are texts that are the same in every process, so that fingerprints of two processes can be compared. `main` runs
in processes of its own, for tests/test_import_effects.py.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import hashlib
import importlib
import json
import logging
import os
import pickle
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

OWN = "forge"
"""Names of our packages begin with this."""
PATCHABLE = (
    "builtins",
    "collections.abc",
    "copy",
    "copyreg",
    "logging",
    "multiprocessing.process",
    "os",
    "pickle",
    "random",
    "signal",
    "threading",
    "warnings",
    "numpy",
    "numpy.random",
    "torch",
    "torch._tensor",
    "torch.amp.grad_scaler",
    "torch.autograd",
    "torch.autograd.function",
    "torch.autograd.graph",
    "torch.cuda",
    "torch.distributed",
    "torch.jit",
    "torch.nn.functional",
    "torch.nn.init",
    "torch.nn.modules.module",
    "torch.nn.parallel.distributed",
    "torch.nn.parameter",
    "torch.optim.lr_scheduler",
    "torch.optim.optimizer",
    "torch.overrides",
    "torch.random",
    "torch.serialization",
    "torch.utils._python_dispatch",
    "torch.utils.checkpoint",
    "torch.utils.data.dataloader",
    "torch.utils.data.sampler",
)
"""Modules whose attributes, and whose classes' attributes, somebody might replace. They are looked at once loaded."""
AT_FORK: list[str] = []
"""What was registered with os.register_at_fork, which cannot be read."""


def note_forks() -> None:
    """Note from now on what is registered with os.register_at_fork."""
    register = os.register_at_fork

    def noting(**functions: Any) -> None:
        AT_FORK.extend(f"{when}: {text(function)}" for when, function in functions.items())
        register(**functions)

    os.register_at_fork = noting


def text(value: Any) -> str:
    """Return a text for a value: equal texts mean the same function, class or plain value."""
    kind = type(value)  # not `isinstance`, which asks the value itself: some of torch's warn when they are touched
    if issubclass(kind, types.FunctionType):
        wrapped = f" around {text(value.__wrapped__)}" if hasattr(value, "__wrapped__") else ""
        return f"{value.__module__}.{value.__qualname__} ({value.__code__.co_filename}){wrapped}"
    if issubclass(kind, (staticmethod, classmethod)):
        return f"{kind.__name__} {text(value.__func__)}"
    if issubclass(kind, property):
        return f"property {text(value.fget)} {text(value.fset)}"
    if issubclass(kind, types.MethodType):
        return f"{text(value.__func__)} of {text(type(value.__self__))}"
    if issubclass(kind, type):
        return f"class {value.__module__}.{value.__qualname__}"
    if issubclass(kind, types.ModuleType):
        return f"module {value.__name__}"
    if issubclass(kind, (str, bytes, int, float, type(None))):
        return repr(value)
    if issubclass(kind, (tuple, list)):
        return f"[{', '.join(map(text, value))}]"
    if issubclass(kind, Mapping):
        return f"{{{', '.join(sorted(f'{text(key)}: {text(each)}' for key, each in value.items()))}}}"
    return f"a {kind.__module__}.{kind.__qualname__}"


def _attributes(name: str) -> Iterator[tuple[str, str]]:
    """Yield what a module's names mean, and the names of its own classes; registries with all their entries."""
    for key, value in vars(sys.modules[name]).items():
        if key.startswith("__") or key == "_startTime" or issubclass(type(value), types.ModuleType):
            continue  # a submodule becomes an attribute when it is imported; logging's clock
        is_plain = not issubclass(type(value), (dict, list, set)) or key.startswith("_global")
        yield f"{name}.{key}", text(value) if is_plain else f"a {type(value).__name__}"
        if issubclass(type(value), type) and value.__module__ == name:
            for member, content in vars(value).items():
                if callable(content) or isinstance(content, (staticmethod, classmethod, property)):
                    yield f"{name}.{key}.{member}", text(content)


def _python() -> Iterator[tuple[str, Any]]:
    yield "sys.meta_path", sys.meta_path
    yield "sys.path_hooks", sys.path_hooks
    yield "sys.path", sys.path
    for name in ("excepthook", "unraisablehook", "displayhook", "breakpointhook", "stdout", "stderr", "stdin"):
        yield f"sys.{name}", getattr(sys, name)
    yield "sys.gettrace()", sys.gettrace()
    yield "sys.getprofile()", sys.getprofile()
    yield "sys.getrecursionlimit()", sys.getrecursionlimit()
    yield "sys.getswitchinterval()", sys.getswitchinterval()
    yield "os.environ", dict(os.environ)
    yield "os.getcwd()", os.getcwd()
    yield "functions at a fork", AT_FORK
    yield "atexit", atexit._ncallbacks()  # pyright: ignore[reportAttributeAccessIssue]
    yield "gc.callbacks", gc.callbacks
    yield "gc.get_threshold()", gc.get_threshold()
    yield "gc.isenabled()", gc.isenabled()
    yield "faulthandler.is_enabled()", faulthandler.is_enabled()
    yield "warnings.filters", [[getattr(part, "pattern", part) for part in each] for each in warnings.filters]
    for number in signal.valid_signals():
        yield f"signal {number}", signal.getsignal(number)
    yield "threads", [thread.name for thread in threading.enumerate()]
    for logger in (logging.getLogger(), logging.getLogger(OWN)):
        yield f"logger {logger.name}", [logger.level, logger.handlers, logger.filters, logger.propagate]
    yield "logging", [logging.getLoggerClass(), logging.getLogRecordFactory(), logging.root.manager.disable]
    yield "copyreg.dispatch_table", sys.modules["copyreg"].dispatch_table


def _torch() -> Iterator[tuple[str, Any]]:
    import torch
    from torch.utils import _pytree
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    yield "modes of functions", torch._C._len_torch_function_stack()
    yield "modes of dispatch", len(_get_current_dispatch_mode_stack())
    internals: Any = torch._C
    yield "hooks of saved tensors", internals._autograd._top_saved_tensors_default_hooks(True)
    for name in (
        *("get_default_dtype", "get_default_device", "get_num_threads", "get_num_interop_threads", "is_grad_enabled"),
        *("is_inference_mode_enabled", "is_anomaly_enabled", "are_deterministic_algorithms_enabled"),
        *("get_float32_matmul_precision", "is_warn_always_enabled", "get_deterministic_debug_mode"),
    ):
        yield f"torch.{name}()", str(getattr(torch, name)())
    for device in ("cpu", "cuda"):
        yield f"autocast on {device}", [torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device))]
    yield "safe globals", sorted(map(text, torch.serialization.get_safe_globals()))
    yield "nodes of trees", [name for name in map(text, _pytree.SUPPORTED_NODES) if OWN in name]
    for path in ("backends.cudnn", "backends.cuda.matmul", "backends.mkldnn", "backends.cuda"):
        owner: Any = torch
        for part in path.split("."):
            owner = getattr(owner, part)
        for key in sorted(set(dir(type(owner))) | set(dir(owner))):
            value = None if key.startswith("_") else getattr(owner, key, None)
            if isinstance(value, (bool, int, str)):
                yield f"torch.{path}.{key}", value
    for name in ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config"):
        if name in sys.modules:
            settings: Any = sys.modules[name]
            yield from ((f"{name}.{key}", value) for key, value in settings.get_config_copy().items())
    own = torch.Generator().manual_seed(torch.initial_seed()).get_state()
    yield "torch's generator", "untouched" if torch.equal(own, torch.get_rng_state()) else "drawn from or seeded"


def fingerprint() -> dict[str, str]:
    """Return everything by name, as texts."""
    found = {name: text(value) for name, value in _python()}
    if "torch" in sys.modules:
        found |= {name: text(value) for name, value in _torch()}
    for name in PATCHABLE:
        if name in sys.modules:
            found |= dict(_attributes(name))
    return found


def generators() -> dict[str, str]:
    """Return the states of Python's and numpy's generators, which each process begins by itself."""
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy.random"] = sys.modules["numpy"].random.get_state()
    return {name: hashlib.sha256(pickle.dumps(state)).hexdigest() for name, state in states.items()}


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return a line for each thing that differs."""
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return [f"{name}: {before.get(name, 'nothing')} -> {after.get(name, 'nothing')}" for name in names]


def main(way: str, names: Iterable[str]) -> None:
    """Import our modules, `names`, and print the result as JSON.

    `first`: in a bare process, which loads torch and others on the way. Prints which, and the fingerprint.
    `after`: reads that from stdin and imports the others alone: the fingerprint must be the same without our modules.
    Then it imports ours: the fingerprint must not change. `each`: the same, looking after each of them.
    """
    note_forks()
    if way == "first":
        for name in names:
            importlib.import_module(name)
        others = [name for name in sys.modules if not name.startswith(OWN)]
        print(json.dumps({"others": others, "fingerprint": fingerprint()}))
        return
    report = json.load(sys.stdin)
    for name in report["others"]:
        with suppress(ImportError):  # an entry that somebody made by hand
            importlib.import_module(name)
    changes = {"before torch": difference(fingerprint(), report["fingerprint"])}
    begin, changes["after torch"] = {**fingerprint(), **generators()}, []
    for name in names:
        importlib.import_module(name)
        if way == "each":
            now = {**fingerprint(), **generators()}
            changes["after torch"] += [f"{name} changes {line}" for line in difference(begin, now)]
            begin = now
    changes["after torch"] += difference(begin, {**fingerprint(), **generators()})
    print(json.dumps(changes))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
