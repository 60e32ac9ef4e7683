"""Private names of torch are used in one module per package, `torch_internals.py`, which lists each."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import house
from tests.support import forked

PRIVATE_PATH = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")
"""A dotted name that reaches a private part of torch, `__dunder__` names aside."""


def test_only_the_seam_of_a_package_uses_private_names_of_torch() -> None:
    found = [
        f"{path.relative_to(house.REPO)}:{line}: {name}"
        for path in house.MODULES.values()
        if path.name != "torch_internals.py"
        for line, name in private_names(path.read_text())
    ]
    assert not found, "name these in the torch_internals.py of their package:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch.utils._pytree as p", "torch.utils._pytree"),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("from torch.nn.modules.batchnorm import _BatchNorm", "torch.nn.modules.batchnorm._BatchNorm"),
        ("import torch as t\nt._foreach_add_([], [])", "torch._foreach_add_"),
        ("import torch.cuda\ntorch.cuda._sleep(1)", "torch.cuda._sleep"),
        ("from torch.autograd import forward_ad as f\nf._current_level", "torch.autograd.forward_ad._current_level"),
        (
            "from torch import nn\nx = nn.modules\ny = x.batchnorm\ny._BatchNorm",
            "torch.nn.modules.batchnorm._BatchNorm",
        ),
        ("import torch\ngetattr(torch.cuda, '_sleep', None)", "torch.cuda._sleep"),
        ("from importlib import import_module\nimport_module('torch._dynamo')", "torch._dynamo"),
    ],
)
def test_a_use_of_a_private_name_is_found(code: str, name: str) -> None:
    assert [found for _, found in private_names(code)] == [name]


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.__version__\ntorch.nn.Module.__init__",
        "import torch\nmodule = torch.nn.Linear(1, 1)\nmodule._parameters",
        "from mine import torch\ntorch._x",
        "import logging\nlogging.getLogger('torch._dynamo')",
    ],
)
def test_a_public_name_and_an_attribute_of_an_instance_are_not(code: str) -> None:
    assert list(private_names(code)) == []


FIT = ["fit", "quickstart", "-p", "no:first_look", "-p", "ema", "-p", "sam", "trainer.max_updates=8", "trainer.seed=3"]
WITHOUT = """
import sys
from forge.cli import main
from forge.torch_internals import Internal
Internal.find = lambda self: (None, [self.path])
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_without_any_private_name_a_run_gives_the_same_bits(empty_folder: Path) -> None:
    """What stands in for a missing name does the same; first_look refuses, since it looks into batches."""
    command = [sys.executable, "-c", WITHOUT, *FIT, "trainer.run_dir=gone"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = forked.forge(*FIT, "trainer.run_dir=there")
    assert done.returncode == 0, done.stderr
    there, gone = (Path(names, "weights.safetensors").read_bytes() for names in ("there", "gone"))
    assert there == gone


def private_names(code: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name of every private name of torch: in imports, and in attributes of names that
    stand for torch or a part of it."""
    tree = ast.parse(code)
    nodes = list(ast.walk(tree))
    stands_for = _torch_names(nodes)
    inner = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        for name in _reached(node, stands_for, inner):
            if PRIVATE_PATH.fullmatch(name):
                yield getattr(node, "lineno", 0), name


def _torch_names(nodes: list[ast.AST]) -> dict[str, str]:
    """What each name of a file stands for, where that is torch or a part of it: `t` for `torch`, `F` for …"""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "torch":
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes:  # breadth first: an alias of an alias comes later in the file, on the same level
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
            path = _dotted(node.value, names)
            names |= {target.id: path for target in node.targets if path and isinstance(target, ast.Name)}
    return names


def _reached(node: ast.AST, names: dict[str, str], inner: set[ast.expr]) -> Iterator[str]:
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom(module=str(module)):
            yield from (f"{module}.{alias.name}" for alias in node.names)
        case ast.Attribute() if node not in inner:
            yield _dotted(node, names)
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[of, ast.Constant(value=str(name)), *_]):
            yield f"{_dotted(of, names)}.{name}"
        case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(name)), *_]):
            yield name


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The dotted name of an expression that starts at a name for torch; "" for any other."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        start = _dotted(node.value, names)
        return f"{start}.{node.attr}" if start else ""
    return ""
