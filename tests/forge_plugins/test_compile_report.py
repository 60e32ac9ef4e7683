"""compile: an honest account of what was compiled, and of what was not."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.testing import TinyTask, tiny_batches
from forge_plugins import Compile
from forge_plugins.compile import compile_watch
from forge_plugins.compile.compiler import SOURCE
from tests.support import compile_kit
from tests.support.compile_kit import EVEN, Breaks, Plain, counts, fit

nothing_of_the_last_test = compile_kit.nothing_of_the_last_test
every_line = compile_kit.every_line


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


# ---------------------------------------------------------------------------------------------------------------------
# What was compiled


def test_a_break_is_logged_with_file_line_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    result = fit(Compile(backend="eager"), Breaks(), validate_every=None)[1]
    assert counts(result) == (2, 1, 0)
    assert "compile: 2 graphs of 2 ops, 1 break, no recompiles" in caplog.text
    line = line_of(Breaks.training_step, "graph_break()")
    assert f"  break at {compile_kit.__file__}:{line}: User-inserted graph break." in caplog.text
    assert caplog.text.count("break at") == 1


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "ignore_logging_functions"), reason="needs torch 2.11")
def test_a_warning_of_transformers_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """torch 2.11 writes its settings as JSON with every compilation, and loses its record if it cannot."""
    logger = pytest.importorskip("transformers.utils.logging").get_logger("transformers.modeling_utils")

    class Warns(Plain):
        def training_step(self, batch: Any) -> Any:
            logits = self.net(batch[0])
            logger.warning_once("once")
            return F.cross_entropy(logits, batch[1])

    settings: list[str] = []

    class Look(forge.Plugin):
        @forge.hookimpl
        def forge_step_end(self) -> None:
            settings.append(json.dumps(sorted(torch._dynamo.config.get_config_copy()["ignore_logging_functions"])))

    before = torch._dynamo.config.ignore_logging_functions
    assert counts(fit(Compile(backend="eager"), Warns(), Look(), validate_every=None)[1]) == (1, 0, 0)
    assert settings == ['["warning_once"]'] * len(EVEN)
    assert torch._dynamo.config.ignore_logging_functions == before == set()
    assert not [record for record in caplog.records if record.name.startswith("torch._dynamo")]


@pytest.mark.slow
def test_what_was_compiled_is_said_once_and_when_it_changes() -> None:
    logged: list[tuple[int, dict[str, Any]]] = []

    class Sink(forge.Plugin):
        @forge.hookimpl
        def forge_log(self, update: int, metrics: dict[str, Any]) -> None:
            logged.append((update, {name: value for name, value in metrics.items() if name.startswith("compile/")}))

    fit(Compile(backend="eager"), None, Sink(), train=tiny_batches((8, 8, 8, 8, 5)), validate_every=None, log_every=2)
    first = {"compile/graphs": 1, "compile/breaks": 0, "compile/recompiles": 0}
    assert (
        logged
        == [(2, first), (4, {}), (5, {**first, "compile/graphs": 2, "compile/recompiles": 1}), (5, {})][: len(logged)]
    )


@pytest.mark.slow
def test_a_stream_of_shapes_is_warned_of_with_the_fix(caplog: pytest.LogCaptureFixture) -> None:
    with torch._dynamo.config.patch(recompile_limit=4):
        plugin = Compile(backend="eager", dynamic=False)
        fit(plugin, train=tiny_batches(range(3, 10)), validate_every=None, log_every=1)
    warnings = [r.getMessage() for r in caplog.records if r.name == "forge" and r.levelno == logging.WARNING]
    assert ["in each of the last 3 log intervals" in text for text in warnings] == [True, False]
    assert "training_step was compiled for so many kinds of inputs that torch gave up" in warnings[1]
    assert "A resumed run would compile them again, and so end in other bits" in warnings[1]
    for text in warnings:
        assert "size mismatch at index 0" in text
        assert "Pad batches to one shape" in text
        assert "compile.dynamic=true" in text


@pytest.mark.slow
def test_a_number_that_is_read_in_the_step_is_blamed(caplog: pytest.LogCaptureFixture) -> None:
    class Reads(Plain):
        def training_step(self, batch: Any) -> Any:
            logits = self.net(batch[0])
            scale = logits.sum().item()
            return F.cross_entropy(logits * scale, batch[1])

    plugin = Compile(backend="eager", dynamic=False)
    fit(plugin, Reads(), train=tiny_batches([8] * 6), validate_every=None, log_every=1)
    assert "became part of the graph: keep it in a tensor" in caplog.text


# ---------------------------------------------------------------------------------------------------------------------
# What torch prints of it


NOISE = "Graph break from `Tensor.item()`, consider setting:"


class Tells(Plain):
    """Has torch's logger say something in the first step, outside of the graph."""

    error: Exception | None = None

    @torch.compiler.disable
    def tell(self) -> None:
        for text in (f"{NOISE} a\n", "something else"):
            logging.getLogger(SOURCE).warning(text)
        if self.error is not None:
            raise self.error

    def training_step(self, batch: Any) -> Any:
        self.tell()  # pyright: ignore[reportCallIssue]
        return F.cross_entropy(self.net(batch[0]), batch[1])


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first lines of what torch's logger lets through."""
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger(SOURCE), "handle", _handle_to(lines))
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    return lines


def _handle_to(lines: list[str]) -> Callable[[logging.LogRecord], None]:
    source = logging.getLogger(SOURCE)

    def handle(record: logging.LogRecord) -> None:
        if source.filter(record):
            lines.append(record.getMessage().splitlines()[0])

    return handle


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, ZeroDivisionError()], ids=["a whole run", "an error"])
def test_torch_may_speak_again_after_the_run(error: Exception | None, printed: list[str]) -> None:
    before, task = list(logging.getLogger(SOURCE).filters), Tells()
    task.error = error
    with pytest.raises(ZeroDivisionError) if error else nullcontext():
        fit(Compile(backend="eager"), task, max_updates=1)
    assert printed == ["something else"]
    assert logging.getLogger(SOURCE).filters == before


# ---------------------------------------------------------------------------------------------------------------------
# Nothing was compiled


def test_a_stance_that_keeps_everything_eager_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with torch.compiler.set_stance("force_eager"):
        fit(Compile(backend="eager"), max_updates=1)
    assert "compile: nothing was compiled; training is eager, and not faster." in caplog.text
    assert 'torch.compiler.set_stance("force_eager") is active' in caplog.text


def test_a_step_that_breaks_off_is_warned_of_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    class Shy(Plain):
        @torch.compiler.disable
        def training_step(self, batch: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return F.cross_entropy(self.net(batch[0]), batch[1])

    fit(Compile(backend="eager"), Shy(), max_updates=1)
    assert "compile: nothing was compiled; training is eager, and not faster. Every graph broke off" in caplog.text
    assert "  at " in caplog.text


@pytest.mark.slow
def test_without_torchs_accounts_there_is_less_and_no_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._dynamo.utils

    monkeypatch.delattr(torch._dynamo.utils, "graph_break_reasons")
    monkeypatch.delattr(torch._dynamo.utils, "get_compilation_metrics")
    monkeypatch.setattr(compile_watch, "_counters", lambda: None)
    fit(Compile(backend="eager", blocks="net"), TinyTask(), max_updates=1)
    assert "nothing was compiled" not in caplog.text
