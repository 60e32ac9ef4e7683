"""`forge.kernels` is `forge_kernels`: the same objects under both names, for imports, pickles and type checkers."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import forge
import forge_kernels
from tests.conftest import REPO, Run

SUBMODULES = ("contract", "testing", "ops.cpp.build")
"""The documented ones."""

FIRST_IMPORTS = [
    "import forge.kernels.contract as m",
    "from forge.kernels import contract as m",
    "import forge.kernels.ops.cpp.build as m",
    "from forge.kernels import testing as m",
]

FIRST = """
import importlib, os, sys, traceback
import torch  # once, for all the processes that are forked from this one

def first(statement):
    exec(statement, globals())
    assert m.__name__.startswith("forge_kernels") and m is importlib.import_module(m.__name__)
    found = [getattr(module, "__file__", None) or "" for module in {{*sys.modules.values()}}]
    files = [file for file in found if "forge_kernels" in file]
    assert len(files) == len({{*files}}), "a file was imported twice"

assert "forge" not in sys.modules
for statement in {statements!r}:
    if not (child := os.fork()):
        try:
            first(statement)
            os._exit(0)
        except BaseException:
            print(statement, file=sys.stderr)
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
"""

USER = """
import forge
import forge.kernels.contract
from forge import kernels
from forge.kernels import softmax
from forge.kernels.contract import Case, Cost, Functional, Kernel, unusable
from forge.kernels.ops.cpp.build import missing
from forge.kernels.testing import check_against_reference, poisoned_memory

print(softmax, kernels.softmax, forge.kernels.contract.Cost, Case, Cost, Functional, Kernel, unusable)
print(missing, check_against_reference, poisoned_memory)

from forge_kernels import softmax as own_softmax
from forge_kernels.contract import Kernel as OwnKernel

reveal_type((own_softmax, OwnKernel))
"""


def test_the_package_and_its_names_are_the_same_objects() -> None:
    from forge import kernels
    from forge.kernels import linear_cross_entropy, softmax

    assert kernels is sys.modules["forge.kernels"] is forge.kernels
    assert softmax is forge_kernels.softmax
    assert linear_cross_entropy is forge_kernels.linear_cross_entropy
    assert all(getattr(kernels, name) is getattr(forge_kernels, name) for name in forge_kernels.__all__)


@pytest.mark.parametrize("name", SUBMODULES)
def test_a_submodule_is_one_module_with_its_own_spec(name: str) -> None:
    alias = importlib.import_module(f"forge.kernels.{name}")
    real = importlib.import_module(f"forge_kernels.{name}")
    assert alias is real is importlib.import_module(f"forge.kernels.{name}")
    assert real.__name__ == real.__spec__.name == f"forge_kernels.{name}"  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.slow
def test_any_import_may_come_first(run_python: Run) -> None:
    done = run_python("-c", FIRST.format(statements=FIRST_IMPORTS))
    assert done.returncode == 0, done.stderr


def test_a_missing_submodule_is_named_as_it_was_asked_for() -> None:
    assert find_spec("forge.kernels.nothing") is None
    with pytest.raises(ModuleNotFoundError, match=r"forge\.kernels\.nothing"):
        importlib.import_module("forge.kernels.nothing")


@pytest.mark.slow
def test_a_type_checker_accepts_the_alias_and_sees_the_types(tmp_path: Path) -> None:
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        pytest.skip("pyright is not installed")
    (tmp_path / "user.py").write_text(USER)
    paths = [str(REPO), str(REPO / "plugins"), str(REPO / "recipes")]
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": {paths!r}}}'.replace("'", '"'))
    line = [pyright, "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert "0 errors, 0 warnings" in done.stdout, done.stdout
    assert "dtype | None = None) -> Tensor, type[Kernel]]" in done.stdout, done.stdout
