"""Kernels by name: found through entry points, imported when asked for, told apart by their source."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from forge import registry as installed
from forge.errors import ForgeError
from forge_kernels import discovery
from tests.conftest import Run
from tests.support.toy_kernels import TOY, entries, toy

PACKAGE = {
    "forge_third-1.2.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: forge-third\nVersion: 1.2.3\n",
    "forge_third-1.2.3.dist-info/entry_points.txt": "[forge.kernels]\nthird = forge_third:THIRD\nno = forge_third:NO\n",
    "forge_third.py": """
import torch
from forge_kernels.contract import Case, Cost, Functional, Kernel

THIRD = Kernel(
    name="third",
    summary="one third of x",
    function=lambda x: x / 3,
    reference=lambda x: x / 3,
    supports=lambda x: None,
    tolerance={torch.float32: 1e-6},
    cost=lambda x: Cost(x.numel(), 16 * x.numel()),
    cases=(Case("8", lambda device, dtype: (torch.randn(8, device=device, dtype=dtype, requires_grad=True),)),),
    replaces=(Functional("torch.nn.functional.relu", lambda original, x, inplace=False: original(x, inplace)),),
)
""",
}


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    def only(found: dict[str, Any]) -> None:
        monkeypatch.setattr(installed, "installed", lambda kind: found)

    return only


def third_party(folder: Path) -> Path:
    """A package with a kernel, and with one that cannot be imported, as an installer leaves it."""
    for name, text in PACKAGE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_kernel_is_loaded_by_name(only: Any) -> None:
    only(entries("toy", "toy_rival"))
    assert discovery.names() == ["toy", "toy_rival"]
    assert discovery.load("toy") is TOY


def test_names_are_known_without_importing_anything(only: Any) -> None:
    only(entries(lost="a_package_that_nobody_has:LOST"))
    assert discovery.names() == ["lost"]
    with pytest.raises(ForgeError, match=r"kernel 'lost' of .* cannot be imported \(a_package_that_nobody_has:LOST\)"):
        discovery.load("lost")


def test_an_unknown_name_is_refused_with_the_nearest(only: Any) -> None:
    only(entries("toy"))
    with pytest.raises(ForgeError, match=r"No kernel is called 'tooy'. Did you mean 'toy'\?"):
        discovery.load("tooy")


def test_the_version_follows_the_source_and_what_it_makes_use_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "forge_versioned"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "ops.py").write_text("def run(x):\n    return x\n")
    (package / "kernel.py").write_text("from forge_versioned import ops\n\n\ndef run(x):\n    return ops.run(x)\n")
    monkeypatch.syspath_prepend(tmp_path)
    kernel = toy("versioned")
    object.__setattr__(kernel, "function", importlib.import_module("forge_versioned.kernel").run)
    first = discovery.version(kernel)
    assert discovery.version(kernel) == first
    (package / "ops.py").write_text("def run(x):\n    return x + 1\n")
    assert discovery.version(kernel) != first


@pytest.mark.slow
def test_a_third_partys_kernel_is_listed_shown_and_measured(run_forge: Run, tmp_path: Path) -> None:
    paths = [third_party(tmp_path)]
    listed = run_forge("kernels", paths=paths)
    assert listed.returncode == 0, listed.stderr
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith("third")]
    assert "one third of x" in line
    assert "fp32" in line
    assert "relu" in line
    assert "forge-third 1.2.3" in line
    assert "has no attribute 'NO'" in " ".join(listed.stdout.split())
    measured = run_forge("kernels", "bench", "third", "--interpret", "--quick", "--against", "eager", paths=paths)
    assert measured.returncode == 0, measured.stderr
    assert "third" in measured.stdout
    assert "eager" in measured.stdout
