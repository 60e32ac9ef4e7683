"""Kernels by name: found through entry points, imported when asked for; and what is wrong with one is named."""

from __future__ import annotations

from typing import Any

import pytest

import forge_kernels
from forge import registry as installed
from forge.errors import KernelError
from forge_kernels import discovery
from tests.support.toy_kernels import TOY, TOY_BARE, entries


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    def only(found: dict[str, Any]) -> None:
        monkeypatch.setattr(installed, "installed", lambda kind: found)

    return only


def test_a_kernel_is_loaded_by_name(only: Any) -> None:
    only(entries("toy", "toy_rival"))
    assert discovery.names() == ["toy", "toy_rival"]
    assert discovery.load("toy") is TOY


def test_what_is_no_kernel_or_has_another_name_is_refused(only: Any) -> None:
    only(entries(calls="tests.support.toy_kernels:CALLS", other="tests.support.toy_kernels:TOY"))
    with pytest.raises(
        KernelError, match=r"kernel 'calls' .*CALLS, which is a list, not a forge_kernels.contract.Kernel"
    ):
        discovery.load("calls")
    with pytest.raises(KernelError, match=r"registers the kernel 'toy' as 'other': the names must be equal"):
        discovery.load("other")


def test_a_third_partys_kernel_is_a_name_of_forge_kernels(only: Any) -> None:
    only(entries("toy_bare"))
    assert forge_kernels.toy_bare is TOY_BARE.function
    with pytest.raises(AttributeError, match="no attribute 'toy_bear'"):
        forge_kernels.toy_bear  # noqa: B018
