"""spans on a CUDA device: whoever makes the host wait is named, with the line, and nobody else."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import forge
from forge_plugins import Accumulate, Clip, Guard, Spans
from tests.support.tasks import Classifier, fit, make_batches

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def default_mode() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("default")
    yield
    torch.cuda.set_sync_debug_mode("default")


class Fused(Classifier):
    """Nothing in it waits."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2, fused=True)


def batches(count: int = 8) -> list[Any]:
    return [(x.pin_memory(), y.pin_memory()) for x, y in make_batches(count)]


def audited(*plugins: forge.Plugin, task: forge.TaskModule | None = None, **options: Any) -> dict[str, Any]:
    """The report of eight updates; the first is left out."""
    spans = Spans(hooks=True, rates=True)
    fit(task or Fused(), batches(), device="cuda", plugins=[spans, *plugins], **options)
    return spans.report


def line_of(thing: Any, text: str) -> int:
    source, first = inspect.getsourcelines(thing)
    return first + next(i for i, line in enumerate(source) if text in line)


class Planted(forge.Plugin):
    """Reads a weight after every update, in a method of its own."""

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        self._look(step.parameters()[0])

    def _look(self, weight: torch.Tensor) -> None:
        self.seen = weight.norm().item()


def test_a_planted_item_is_found_and_named_plugin_hook_and_line() -> None:
    (found,) = audited(Clip(), Planted())["syncs"]
    assert found["who"] == "plugin 'planted' in step_end"
    assert found["file"].endswith("test_spans_cuda.py")
    assert found["line"] == line_of(Planted, ".item()")
    assert found["code"] == "self.seen = weight.norm().item()"
    assert found["per_update"] == 1.0


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * (gradient.norm().item() >= 0)


def test_a_wait_in_backward_has_its_line() -> None:
    class Task(Fused):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ReadsInBackward.apply(super().forward(x))

    (found,) = audited(task=Task())["syncs"]
    assert found["line"] == line_of(ReadsInBackward, ".item()")
    assert found["per_update"] == 1.0


@pytest.mark.parametrize("window", [1, 2])
def test_a_stack_that_never_waits_has_no_waits_reported(window: int) -> None:
    report = audited(Guard(), Clip(), Accumulate(window), log_every=2)
    assert report["syncs"] == []


def test_the_debug_mode_and_the_warnings_are_put_back() -> None:
    class Trips(forge.Plugin):
        @forge.hookimpl
        def forge_step_end(self, step: forge.Step) -> None:
            assert torch.cuda.get_sync_debug_mode() == (1 if step.index else 0)
            if step.index == 4:
                raise ZeroDivisionError

    filters, show = list(warnings.filters), warnings.showwarning
    with pytest.raises(ZeroDivisionError):
        audited(Trips())
    assert torch.cuda.get_sync_debug_mode() == 0
    assert (warnings.filters, warnings.showwarning) == (filters, show)
