"""The plugin `kernels`: what it swaps, when, and that it leaves everything as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import registry
from forge.errors import KernelError, RecipeError
from forge.testing import TinyTask, assert_same_weights, fit_tiny, tiny_batches
from forge_plugins import Compile, Remat
from forge_speed.kernels import Kernels
from tests.conftest import PROFILE
from tests.support import kernels_plugin_kit
from tests.support.kernels_plugin_kit import FOUR, LAYER_NORM_ITSELF, RELU_ITSELF, Clock, ran
from tests.support.toy_kernels import CALLS, entries

clean = kernels_plugin_kit.clean
install = kernels_plugin_kit.install
clock = kernels_plugin_kit.clock


# ---------------------------------------------------------------------------------------------------------------------
# By name


def test_a_named_kernel_runs_in_training_and_validation_only(install: Any) -> None:
    install("toy")
    between = []

    @forge.on("step_end")
    def look(step: forge.Step) -> None:
        between.append(F.relu is RELU_ITSELF)

    options: dict[str, Any] = {"max_updates": 3, "val": tiny_batches([4]), "validate_every": "3 updates"}
    ours, _ = fit_tiny([Kernels("toy"), look], **options)
    assert CALLS[:3] == [("toy", (8, 8))] * 3
    assert ("toy", (4, 8)) in CALLS
    assert between == [True] * 3
    theirs, _ = fit_tiny([], **options)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_all_takes_every_kernel_but_those_left_out(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install("toy", "toy_linear")
    monkeypatch.setattr(Kernels, "_acts_on", lambda self, device: True)
    fit_tiny([Kernels("all")], max_updates=1)
    assert set(ran()) == {"toy", "toy_linear"}
    CALLS.clear()
    fit_tiny([Kernels("all", leave_out="toy")], max_updates=1)
    assert set(ran()) == {"toy_linear"}


def test_after_an_error_in_the_step_everything_is_put_back(install: Any) -> None:
    install("toy", "toy_linear")

    class Fails(TinyTask):
        def training_step(self, batch: Any) -> Any:
            super().training_step(batch)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit_tiny([Kernels(["toy", "toy_linear"])], task=Fails())
    assert set(ran()) == {"toy", "toy_linear"}
    assert F.relu is RELU_ITSELF


def test_what_is_computed_again_runs_on_the_kernel_too(install: Any) -> None:
    install("toy")
    ours, _ = fit_tiny([Kernels("toy"), Remat(modules="net")], max_updates=2)
    assert ran() == ["toy"] * 4
    theirs, _ = fit_tiny([Kernels("toy")], max_updates=2)
    assert_same_weights(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("order", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_compiled_step_has_the_kernel_in_its_graph(install: Any, order: int) -> None:
    install("toy")
    torch._dynamo.reset()
    plugins = [Kernels("toy"), Compile(backend="aot_eager", fullgraph=True)]
    ours, result = fit_tiny(plugins[:: -1 if order else 1], **FOUR)
    assert ran() == ["toy"] * 4
    assert result.metrics["compile/graphs"] == 1
    theirs, _ = fit_tiny([Kernels("toy")], **FOUR)
    assert_same_weights(ours, theirs)


# ---------------------------------------------------------------------------------------------------------------------
# Options and contract


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use": "tooy"}, "kernels.use names 'tooy', but no kernel has that name. Did you mean 'toy'?"),
        ({"use": ["toy", "autoo"]}, "kernels.use names 'autoo'"),
        ({"use": []}, "kernels.use is an empty list"),
        ({"leave_out": "tooy"}, "kernels.leave_out names 'tooy'"),
    ],
)
def test_options_that_make_no_sense_are_refused(install: Any, options: Any, message: str) -> None:
    install("toy")
    with pytest.raises(RecipeError, match=message.replace("?", r"\?")):
        Kernels(**options)


def test_a_pattern_of_compiled_graphs_does_nothing_without_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, others = entries(mlp="forge_kernels.ops.mlp:MLP"), registry.installed
    monkeypatch.setattr(registry, "installed", lambda kind: found if kind == "kernel" else others(kind))
    ours, _ = fit_tiny([Kernels("mlp")], max_updates=2)
    assert caplog.text.count("kernels.use names 'mlp', which replaces several calls of a compiled step") == 1
    assert_same_weights(ours, fit_tiny([], max_updates=2)[0])


def test_naming_a_kernel_that_replaces_nothing_is_refused(install: Any) -> None:
    install("toy_bare")
    with pytest.raises(RecipeError, match=r"'toy_bare', which replaces no torch function. Call forge.kernels.toy_bare"):
        fit_tiny([Kernels("toy_bare")])


def test_a_kernel_of_an_absent_thing_is_refused_if_named(
    install: Any, clock: type[Clock], caplog: pytest.LogCaptureFixture
) -> None:
    install("toy_lost", "toy")
    with pytest.raises(KernelError, match=r"replaces torch.nn.functional.relu_of_tomorrow, which cannot be found"):
        fit_tiny([Kernels("toy_lost")])
    fit_tiny([Kernels()], max_updates=1)
    assert "relu_of_tomorrow" in caplog.text
    assert "toy" in ran()


LEFT_OUT = ["a fit with accumulation", "a fit with two optimizers"] if PROFILE == "quick" else []
"""A fit with both accumulation and two optimizers stands for either."""


def test_one_of_forges_own_kernels_trains_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    import tests.support.kernel_kit  # noqa: F401  (it mends the interpreter)

    found = entries(layer_norm="forge_kernels.ops.norms:LAYER_NORM")
    others = registry.installed
    monkeypatch.setattr(registry, "installed", lambda kind: found if kind == "kernel" else others(kind))
    runs = []

    class Normed(TinyTask):
        def training_step(self, batch: Any) -> Any:
            runs.append(F.layer_norm is not LAYER_NORM_ITSELF)
            x = F.layer_norm(batch[0], (6,), eps=1e-5)
            return super().training_step((x, batch[1]))

    ours, _ = fit_tiny([Kernels("layer_norm")], task=Normed(), max_updates=2)
    theirs, _ = fit_tiny([], task=Normed(), max_updates=2)
    assert runs == [True, True, False, False]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
