"""The kit on a CUDA device: torch itself says what waits inside an update."""

from __future__ import annotations

import pytest

import forge
from forge.testing import check_plugin
from forge_plugins import EMA, Clip

pytestmark = pytest.mark.gpu
LEFT = ["leaks", "runs", "files", "graphs", "exceptions", "order"]
"""All but `capturable`: the others run on the CPU."""


class Peeks(forge.Plugin):
    """Says that it may run in a CUDA graph, and decides by a number."""

    capturable = True

    @forge.hookimpl
    def forge_edit_grads(self, step: forge.Step) -> None:
        for parameter in step.parameters():
            if parameter.grad is not None and parameter.grad.norm() > 1:
                parameter.grad.div_(2)


def test_a_wait_inside_an_update_is_found_with_its_line() -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)'peeks' declares capturable.*forge_edit_grads.*test_kit_cuda.py:\d+"
    ):
        check_plugin(Peeks, leave_out=LEFT)


@pytest.mark.parametrize("make", [lambda: Clip(0.1), lambda: EMA(decay=0.5)], ids=["clip", "ema"])
def test_what_never_waits_passes(make) -> None:
    assert check_plugin(make, leave_out=LEFT) == ("capturable",)
