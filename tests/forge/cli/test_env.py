"""`forge env`: versions, devices, what is installed, and which private names of torch are missing."""

from __future__ import annotations

import platform

import pytest
import torch

import forge
from forge import torch_internals
from forge.cli import env, main
from forge.torch_internals import Internal

GONE = Internal("torch._gone.thing", "draw a cow", "No cow is drawn.")


def test_versions_devices_and_packages_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert f"forge      {forge.__version__}, Python {platform.python_version()}" in out
    assert f"torch      {torch.__version__}" in out
    assert "device     cpu" in out
    assert "omegaconf" in out


def test_nothing_that_forge_uses_is_missing_in_this_torch() -> None:
    """The feature test of every private name, in every installed package."""
    assert {package for package, _ in env.seams()} >= {"forge", "forge_plugins"}
    assert [name for _, internal in env.seams() for name in internal.lacking()] == []


def test_a_missing_name_is_printed_with_what_is_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(torch_internals.NAMES, "gone", GONE)
    assert main(["env"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "and 1 missing torch._gone.thing: forge uses it to draw a cow. No cow is drawn." in text


def test_a_package_that_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env.registry, "packages", lambda: {"forge-nowhere": {}})
    main(["env"])
    assert "not installed: forge-nowhere" in capsys.readouterr().out
