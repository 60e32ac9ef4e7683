"""compile: in place, the bits of eager where no code is generated, and an honest account of what was compiled."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.errors import RecipeError, StackError
from forge.testing import TinyGAN, TinyTask, assert_same, tiny_batches
from forge_plugins import Compile
from forge_plugins.compile import compile_watch
from forge_plugins.compile.compile_watch import Recompile
from forge_plugins.compile.compiler import SOURCE
from tests.support import compile_kit
from tests.support.compile_kit import EVEN, Breaks, Chain, Plain, counts, fit
from tests.support.profiles import some

nothing_of_the_last_test = compile_kit.nothing_of_the_last_test
every_line = compile_kit.every_line


# ---------------------------------------------------------------------------------------------------------------------
# The same bits


@pytest.mark.parametrize(
    ("backend", "blocks"),
    [
        pytest.param("aot_eager", None, id="whole"),
        pytest.param("eager", "Sequential", id="one block", marks=pytest.mark.slow),
        pytest.param("aot_eager", ["net.0", "BatchNorm1d", "Dropout"], id="several blocks", marks=pytest.mark.slow),
    ],
)
def test_without_generated_code_the_bits_are_those_of_eager(backend: str, blocks: Any) -> None:
    """Dropout, BatchNorm and a shorter last batch included."""
    plain, compiled = TinyTask(), TinyTask()
    sizes = tiny_batches((8, 8, 5))
    eagerly = fit(None, plain, train=sizes)[1]
    result = fit(Compile(backend=backend, blocks=blocks), compiled, train=sizes)[1]
    assert_same(compiled, plain)
    assert {name: result.metrics[name] for name in eagerly.metrics} == eagerly.metrics


# ---------------------------------------------------------------------------------------------------------------------
# In place


@pytest.mark.parametrize("blocks", some([None, "Sequential"], quick=1))
def test_names_stay_clean_and_the_task_is_handed_back_as_it_was(blocks: str | None) -> None:
    names: list[list[str]] = []

    @forge.on("step_end")
    def look(step: forge.Step) -> None:
        trainer = step.trainer
        names.append(list(trainer.task.state_dict()))
        compiled = [module for module in trainer.model.modules() if module._compiled_call_impl is not None]
        assert compiled == [trainer.task.net if blocks else trainer.model]
        assert all(module._compiled_call_impl is None for module in copy.deepcopy(trainer.task).modules())

    task, _ = fit(Compile(backend="eager", blocks=blocks), TinyTask(), look, max_updates=1)
    assert names == [list(task.state_dict())]
    assert all(module._compiled_call_impl is None for module in task.modules())


def test_the_task_is_handed_back_after_an_error() -> None:
    class Fails(TinyTask):
        def validation_step(self, batch: Any) -> Any:
            raise ZeroDivisionError

    task = Fails()
    with pytest.raises(ZeroDivisionError):
        fit(Compile(backend="eager", blocks="net"), task)
    assert all(module._compiled_call_impl is None for module in task.modules())


@pytest.mark.slow
def test_late_hooks_of_a_compiled_module_are_heard() -> None:
    heard: list[tuple[int, int]] = []

    class Listen(forge.Plugin):
        @forge.hookimpl
        def forge_step_end(self, step: forge.Step) -> None:
            if step.index == 0:
                update = step.trainer.progress
                hear: Any = lambda module, args, output: heard.append((update.update, len(output)))  # noqa: E731
                task: Any = step.trainer.task
                self.handle = task.net.register_forward_hook(hear)

    plugin, plain, compiled = Listen(), TinyTask(), TinyTask()
    fit(None, plain, validate_every=None)
    result = fit(Compile(backend="aot_eager", blocks="net"), compiled, plugin, validate_every=None)[1]
    plugin.handle.remove()
    assert heard == [(1, 8)]
    assert counts(result) == (1, 0, 0)
    assert_same(compiled, plain)


@pytest.mark.slow
def test_evaluation_alone_runs_compiled_too(caplog: pytest.LogCaptureFixture) -> None:
    batches, task = tiny_batches(EVEN), TinyTask()
    plain = forge.Trainer(plugins=[], device="cpu").validate(task, batches)
    compiled = forge.Trainer(plugins=[Compile(backend="eager")], device="cpu").validate(task, batches)
    assert compiled == plain
    assert "compile: 1 graph of" in caplog.text


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


def test_a_sequential_is_really_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """Its own `.compile()` compiles nothing in some versions of torch, and says nothing."""
    assert counts(fit(Compile(backend="eager", blocks="net"), Chain(4), validate_every=None)[1]) == (1, 0, 0)
    assert "compile: compiled separately: net." in caplog.text
    assert "compile: 1 graph of 2 ops, no breaks, no recompiles" in caplog.text


def test_alike_blocks_share_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    """The first one is given a batch, which has no gradient: a graph of its own, and no recompile."""
    task = Chain(*[6] * 11)
    result = fit(Compile(backend="eager", blocks="Linear"), task, validate_every=None)[1]
    assert counts(result) == (3, 0, 0)  # first, others, and the last, which has other widths
    assert "compile: compiled separately: net.0-11." in caplog.text


def test_a_pattern_without_a_match_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"compile\.blocks: 'Sequental' is neither.*Did you mean 'Sequential'"):
        fit(Compile(backend="eager", blocks="Sequental"), TinyTask())


def test_blocks_without_a_graph_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Shy(nn.Module):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return torch.relu(x)

    task = Chain(6)
    task.net.append(Shy())
    fit(Compile(backend="eager", blocks=["Linear", "Shy"]), task, max_updates=1)
    assert "compile: nothing was compiled in net.2: " in caplog.text


# ---------------------------------------------------------------------------------------------------------------------
# What compiles


def test_a_missing_cpp_compiler_is_said_before_training() -> None:
    from torch._inductor import config

    said = r"inductor needs a C\+\+ compiler, and none was found\. Install g\+\+"
    with config.patch({"cpp.cxx": ("/no/such/compiler",)}), pytest.raises(StackError, match=said):
        fit(Compile())


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"compile\.backend is 'aot_eagr'.*Did you mean 'aot_eager'"):
        fit(Compile(backend="aot_eagr"))


def test_fullgraph_refuses_a_break_and_says_what_to_do() -> None:
    with pytest.raises(Exception, match="graph break") as refused:
        fit(Compile(backend="eager", fullgraph=True), Breaks())
    assert any("compile.fullgraph=true takes no graph breaks" in note for note in refused.value.__notes__)


def test_an_error_of_the_user_keeps_its_type_and_place() -> None:
    class Fails(Plain):
        def training_step(self, batch: Any) -> Any:
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine") as raised:
        fit(Compile(backend="eager"), Fails())
    assert "Fails.training_step, at update 0" in "".join(raised.value.__notes__)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, r"Compile\.mode is 'fast'"),
        ({"mode": "max-autotune", "backend": "aot_eager"}, r"compile\.mode=max-autotune is for inductor"),
        ({"blocks": []}, r"compile\.blocks is an empty list"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Compile(**options)


# ---------------------------------------------------------------------------------------------------------------------
# Against eager


class Odd(nn.Module):
    """Gives something else when it is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.1 if torch.compiler.is_compiling() else x


def odd() -> TinyTask:
    task: Any = TinyTask()
    task.net[2] = nn.Sequential(nn.ReLU(inplace=True), Odd(), nn.Identity())
    return task


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (Plain, None),
        (TinyTask, "Sequential"),
        pytest.param(TinyTask, None, marks=pytest.mark.slow),
        pytest.param(TinyGAN, None, marks=pytest.mark.slow),
    ],
)
def test_comparing_leaves_no_trace_in_the_run(make: Any, blocks: str | None, caplog: pytest.LogCaptureFixture) -> None:
    plain, compared = make(), make()
    result = fit(Compile(backend="aot_eager", blocks=blocks), plain, validate_every=None)[1]
    again = fit(Compile(backend="aot_eager", blocks=blocks, compare=True), compared, validate_every=None)[1]
    assert_same(compared, plain)
    assert counts(again) == counts(result)
    assert "compiled and eager agree on the first batch bit for bit." in caplog.text


def test_a_difference_that_is_too_large_names_torchs_minifier(caplog: pytest.LogCaptureFixture) -> None:
    fit(Compile(backend="eager", compare=True), odd(), max_updates=1)
    assert "compiled and eager disagree on the first batch: they differ most in the gradients (net." in caplog.text
    assert "of its size; 0.001 is allowed for float32" in caplog.text
    assert "TORCHDYNAMO_REPRO_AFTER=aot" in caplog.text


# ---------------------------------------------------------------------------------------------------------------------
# The small parts


@pytest.mark.parametrize(
    ("reason", "expected", "short"),
    [
        ("tensor 'batch[0]' size mismatch at index 0. expected 8, actual 5", False, (5, 8)),
        ("tensor 'batch[0]' size mismatch at index 0. expected 5, actual 8", False, None),
        ("tensor 'batch[0]' size mismatch at index 1. expected 8, actual 5", False, None),
        ("tensor 'args[0]' requires_grad mismatch. expected requires_grad=0", True, None),
        ("GLOBAL_STATE changed: grad_mode", True, None),
        ("self._modules['net'].training  # if self.training:  # a.py:3 in forward", True, None),
        ("not self.training  # _dynamo/guards.py:3 in build", True, None),
        ("self.__dict__['training'] == True", True, None),
        ("___stack0 == 3.4  # if z.sum().item() > 0  # a.py:30 in forward", False, None),
        ("self.scale == 1  # if self.training:  # a.py:3 in forward", False, None),
        ("self.scale == 1  # x = x * self.scale  # training/a.py:3 in forward", False, None),
        ("self.scale == 1  # x = x * self.scale  # my training/a.py:3 in forward", False, None),
        ("self.training_scale == 1", False, None),
        ("batch['training'] == 1", False, None),
    ],
)
def test_reasons_are_told_apart(reason: str, expected: bool, short: Any) -> None:
    again = Recompile.read("training_step", f"0/0: {reason}")
    assert (again.expected, again.short_batch) == (expected, short)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (
            "0/0: tensor 'x' size mismatch at index 0. expected 2, actual 3",
            "tensor 'x' size mismatch at index 0. expected 2, actual 3",
        ),
        (
            "4/1: ___stack0 == 3.8      # if z.item() > 0:  # cr/a.py:30 in resume\nUser stack trace:\n ...",
            "no longer ___stack0 == 3.8, at cr/a.py:30: if z.item() > 0:",
        ),
        (
            "0/1: self.k == 1    # x * self.k  # cr/a.py:7 in forward (HINT: integers are static.\nOr not.)\n ...",
            "no longer self.k == 1, at cr/a.py:7: x * self.k",
        ),
        ("0/1: self.k == 1 (HINT: make it a tensor.)", "self.k == 1"),
    ],
)
def test_torchs_reasons_are_told_in_one_line(reason: str, told: str) -> None:
    assert Recompile.read("training_step", reason).reason == told


# ---------------------------------------------------------------------------------------------------------------------
# Generated code


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"blocks": "Sequential"}, {"mode": "max-autotune-no-cudagraphs"}])
def test_generated_code_trains_as_eager_does(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    plain, compiled = TinyTask(dropout=0.0), TinyTask(dropout=0.0)
    fit(None, plain)
    result = fit(Compile(**options, compare=True), compiled)[1]
    for (name, ours), theirs in zip(compiled.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert counts(result)[1:] == (0, 0)
    assert "compiled and eager agree on the first batch" in caplog.text


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
    (text,) = warnings
    assert "training_step was compiled for so many kinds of inputs that torch gave up" in text
    assert "A resumed run would compile them again, and so end in other bits" in text
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
    with torch._dynamo.config.patch(recompile_limit=3):
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
