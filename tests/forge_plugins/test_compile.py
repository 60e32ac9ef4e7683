"""compile: in place, the bits of eager where no code is generated, and an honest account of what was compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.errors import RecipeError, StackError
from forge.testing import TinyTask, assert_same_weights, tiny_batches
from forge_plugins import Accumulate, Clip, Compile
from tests.support import compile_kit, reference
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
    assert_same_weights(compiled, plain)
    assert {name: result.metrics[name] for name in eagerly.metrics} == eagerly.metrics


@pytest.mark.slow
def test_weights_equal_the_loop_around_a_compiled_module() -> None:
    ours, theirs = Plain(), Plain()
    data = tiny_batches((8, 8, 8))
    fit(Compile(backend="aot_eager"), ours, Accumulate(2), Clip(0.1), train=data)
    model: Any = torch.compile(theirs, backend="aot_eager")
    loss_of: Any = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    reference.train(model, loss_of, theirs.configure_optimizers(), data, 1, window=2, clip_norm=0.1, seed=0)
    assert_same_weights(ours, theirs)


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
    assert_same_weights(compiled, plain)


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
