"""`forge plugins check`: the kit's verdict on every plugin of a package, as JSON and as a badge."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forge
from forge import cli
from forge.errors import ForgeError
from forge.testing.conformance import CHECKS
from forge_plugins import conformance

FEW = sorted({*CHECKS} - {"leaks"})
"""Checks that are left out here: the kit has tests of its own."""


class Quiet(forge.Plugin):
    """Do nothing."""

    observer = True


class Bare(forge.Plugin):  # says nothing of itself
    pass


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Plugins by name, as if the package My_Package 1.2 had them."""
    kinds: dict[str, Any] = {"quiet": Quiet}
    dist = SimpleNamespace(name="My_Package", version="1.2")
    entries = lambda kind: {name: SimpleNamespace(dist=dist) for name in kinds}  # noqa: E731
    monkeypatch.setattr(conformance, "registry", SimpleNamespace(installed=entries, load=lambda _, name: kinds[name]))
    return kinds


def test_a_package_that_keeps_the_contract(installed: dict[str, Any]) -> None:
    result = conformance.check_package("my-package", FEW)
    assert result["keeps"]
    assert (result["package"], result["package_version"], result["left_out"]) == ("my-package", "1.2", FEW)
    assert result["plugins"] == {"quiet": {"checked": ["leaks"], "problem": ""}}
    assert conformance.badge(result)["color"] == "brightgreen"


def test_one_plugin_that_breaks_it_is_told_with_the_reason(
    installed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed["bare"] = Bare
    words = [word for name in FEW for word in ("--leave-out", name)]
    assert cli.main(["plugins", "check", "my-package", "--out", str(tmp_path / "out"), *words]) == 1
    written = json.loads((tmp_path / "out" / "conformance.json").read_text())
    assert not written["keeps"]
    assert "Bare has no docstring" in written["plugins"]["bare"]["problem"]
    assert written["plugins"]["quiet"]["problem"] == ""
    badge = json.loads((tmp_path / "out" / "badge.json").read_text())
    assert (badge["schemaVersion"], badge["color"]) == (1, "red")
    assert "2 plugins" in badge["message"]
    assert "Bare has no docstring" in " ".join(capsys.readouterr().out.split())


def test_a_package_without_plugins_is_refused(installed: dict[str, Any]) -> None:
    with pytest.raises(ForgeError, match=r"No installed package 'my-packag' .* Did you mean 'my-package'\?"):
        conformance.check_package("my-packag")
