"""Built-in plugins use only public names of the run, its step, its means, its stack and each other.

A third party must be able to write every one of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge.contract.run import Run
from tests import house

PLUGINS = house.PACKAGES["forge_plugins"]
OUTSIDE_ENGINE = sorted(
    path
    for module, path in house.MODULES.items()
    if house.room_of(module) not in ("engine", "contract", "forge_kernels")
)

MODULES_OF_OTHERS = {"os", "torch", "sys", "aten", "torchs"}
"""Modules whose own underscore names may be used: `torch._foreach_add_`, `sys._getframe`; torch's by two more names."""

OF_MODULES = {"_buffers", "_call_impl", "_compiled_call_impl", "_modules", "_orig_mod", "_parameters"}
OF_MODULES |= {"_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"}
OF_TENSORS = {"_cdata", "_version"}
OF_OPERATORS = {"_overloadpacket", "_schema", "_sequence_nr"}
OF_OPTIMIZERS = {"_found_inf_per_device", "_per_optimizer_states", "_step_supports_amp_scaling"}
OF_OTHERS = {
    "_check_reducer_finalized",
    "_fields",
    "_get_file_writer",
    "_get_init_p2p_neighbors_ops",
    "_module_state_mapping",
    "_quorum_future",
    "_update_configs",
}
OF_DDP = {"_check_reducer_finalized"}
OF_SCHEDULES = {"_schedulers"}
OF_FSDP = {"_fsdp_param_group", "_get_fsdp_state", "_lazy_init", "_wait_for_post_backward"}
OF_FSDP |= {"_post_forward_hook_handle", "_pre_forward_hook_handle"}
ALLOWED = OF_MODULES | OF_TENSORS | OF_OPERATORS | OF_OPTIMIZERS | OF_SCHEDULES | OF_OTHERS | OF_FSDP | OF_DDP
"""Underscore names of torch's objects, and `_fields` of a namedtuple: not forge's to publish."""

RUNS = {"trainer", "step.trainer", "self.trainer", "self._trainer", "run", "self.run", "self._run"}
"""Expressions that are a run."""


def private_uses(tree: ast.AST) -> Iterator[str]:
    """Every `x._name` and `getattr(x, "_name")` where x is neither the object itself nor a module of others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of, name = node.value, node.attr
        elif (
            isinstance(node, ast.Call)
            and called(node) in ("getattr", "setattr", "hasattr", "delattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            of, name = node.args[0], str(node.args[1].value)
        else:
            continue
        if name.startswith("_") and not name.startswith("__") and name not in ALLOWED:
            text = ast.unparse(of)
            if text not in ("self", "cls") and text.partition(".")[0] not in MODULES_OF_OTHERS:
                yield f"{node.lineno}: {text}.{name}"


def private_imports(tree: ast.AST) -> Iterator[str]:
    """Every private name that is imported from forge or another plugin, and every private module of forge."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("forge.", "forge_plugins.")):
            modules = node.module.split(".") if node.module.startswith("forge.") else []
            for part in [*modules, *(alias.name for alias in node.names)]:
                if part.startswith("_") and not part.startswith("__"):
                    yield f"{node.lineno}: from {node.module} import {part}"


def read_only_writes(tree: ast.AST) -> Iterator[str]:
    """Every assignment to, or deletion of, an attribute of a run that is not writable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            of, name = ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and called(node) in ("setattr", "delattr"):
            of, name = ast.unparse(node.args[0]), getattr(node.args[1], "value", "?")
        else:
            continue
        if of in RUNS and name not in Run.WRITABLE and not name.startswith("__"):
            yield f"{node.lineno}: {of}.{name} = ..."


def called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


def test_no_plugin_uses_a_private_name_of_forge() -> None:
    files = sorted(PLUGINS.rglob("*.py"))
    uses = {path: [*private_uses(tree), *private_imports(tree)] for path in files for tree in [parsed(path)]}
    assert {str(path.relative_to(PLUGINS)): found for path, found in uses.items() if found} == {}
    assert len(uses) > 50


def test_nothing_outside_the_engine_sets_what_is_read_only() -> None:
    writes = {path: list(read_only_writes(parsed(path))) for path in OUTSIDE_ENGINE}
    assert {str(path.relative_to(house.REPO)): found for path, found in writes.items() if found} == {}
    assert len(writes) > 150


@pytest.mark.parametrize(
    "code",
    [
        "step._replay(False)",
        "trainer._skip_next |= {1}",
        "self._trainer._session",
        "getattr(step, '_rng')",
    ],
)
def test_a_private_use_is_found(code: str) -> None:
    assert len(list(private_uses(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("self._trainer.metrics, x = {}, 1", 1),
        ("self.trainer.evaluated += 1", 1),
        ("setattr(trainer, name, value)", 1),
        ("del trainer.task", 1),
        ("trainer.max_updates = 3", 0),
        ("step.trainer.env.device = device", 0),
    ],
)
def test_a_write_to_a_read_only_attribute_is_found(code: str, found: int) -> None:
    assert len(list(read_only_writes(ast.parse(code)))) == found
