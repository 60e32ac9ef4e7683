"""The plugin `kernels`: what it swaps, when, by which measurement, and that it leaves everything as it was."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
import forge_speed.kernels as module
from forge import registry
from forge.errors import KernelError, RecipeError
from forge.testing import TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import DDP, Checkpoint, Compile, Remat
from forge_speed.kernels import Kernels
from tests.support import kernel_kit  # noqa: F401 - mends Triton's interpreter
from tests.support.lasting_ranks import ranks
from tests.support.toy_kernels import CALLS, entries

ITSELF = F.relu, F.linear, F.layer_norm
FOUR: dict[str, Any] = {"train": tiny_batches([8] * 4), "max_updates": 4, "log_every": 1, "validate_every": None}
"""Four updates with one shape, and nothing else."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    CALLS.clear()
    yield
    assert (F.relu, F.linear, F.layer_norm) == ITSELF


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have these kernels installed, and nothing else."""
    others = registry.installed

    def install(*names: str, **more: str) -> None:
        found = entries(*names, **more)
        monkeypatch.setattr(registry, "installed", lambda kind: found if kind == "kernel" else others(kind))

    return install


def ran() -> list[str]:
    return [name for name, _ in CALLS]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("kernels")]


# ---------------------------------------------------------------------------------------------------------------------
# By name


def test_a_named_kernel_runs_in_training_and_validation_only(install: Any) -> None:
    install("toy")
    between = []

    @forge.on("step_end")
    def look(step: forge.Step) -> None:
        between.append(F.relu is ITSELF[0])

    options: dict[str, Any] = {"max_updates": 3, "val": tiny_batches([4]), "validate_every": "3 updates"}
    ours, _ = fit_tiny([Kernels("toy"), look], **options)
    assert CALLS[:3] == [("toy", (8, 8))] * 3
    assert ("toy", (4, 8)) in CALLS
    assert between == [True] * 3
    theirs, _ = fit_tiny([], **options)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_off_cuda_only_named_kernels_are_swapped_and_the_log_says_so(
    install: Any, caplog: pytest.LogCaptureFixture
) -> None:
    install("toy", "toy_linear")
    caplog.set_level(logging.INFO, "forge")
    for use in ("auto", "all"):
        assert_same(fit_tiny([Kernels(use)])[0], fit_tiny([])[0])
    assert ran() == []
    assert told(caplog) == ["kernels: nothing is swapped: they run on CUDA, and this run is on cpu."] * 2


def test_after_an_error_in_the_step_everything_is_put_back(install: Any) -> None:
    install("toy", "toy_linear")

    class Fails(TinyTask):
        def training_step(self, batch: Any) -> Any:
            super().training_step(batch)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit_tiny([Kernels(["toy", "toy_linear"])], task=Fails())
    assert set(ran()) == {"toy", "toy_linear"}


def test_what_is_computed_again_runs_on_the_kernel_too(install: Any) -> None:
    install("toy")
    ours, _ = fit_tiny([Kernels("toy"), Remat(modules="net")], max_updates=2)
    assert ran() == ["toy"] * 4
    assert_same(ours, fit_tiny([Kernels("toy")], max_updates=2)[0])


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_a_compiled_step_has_the_kernel_in_its_graph(install: Any, order: int) -> None:
    install("toy")
    torch._dynamo.reset()
    plugins = [Kernels("toy"), Compile(backend="aot_eager", fullgraph=True)]
    ours, result = fit_tiny(plugins[::order], **FOUR)
    assert ran() == ["toy"] * 4
    assert result.metrics["compile/graphs"] == 1
    assert_same(ours, fit_tiny([Kernels("toy")], **FOUR)[0])


def test_one_of_forges_own_kernels_trains_in_the_interpreter(install: Any) -> None:
    install(layer_norm="forge_kernels.ops.norms:LAYER_NORM")
    runs = []

    class Normed(TinyTask):
        def training_step(self, batch: Any) -> Any:
            runs.append(F.layer_norm is not ITSELF[2])
            return super().training_step((F.layer_norm(batch[0], (6,), eps=1e-5), batch[1]))

    ours, _ = fit_tiny([Kernels("layer_norm")], task=Normed(), max_updates=2)
    theirs, _ = fit_tiny([], task=Normed(), max_updates=2)
    assert runs == [True, True, False, False]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("tooy", r"kernels.use names 'tooy', but no kernel has that name. Did you mean 'toy'\?"),
        (["toy", "autoo"], "kernels.use names 'autoo'"),
        ([], "kernels.use is an empty list"),
        (["toy", "toy_rival"], "'toy' and 'toy_rival' replace the same function"),
    ],
)
def test_options_that_make_no_sense_are_refused(install: Any, use: Any, message: str) -> None:
    install("toy", "toy_rival")
    with pytest.raises(RecipeError, match=message):
        fit_tiny([Kernels(use)])


def test_a_kernel_of_a_function_that_torch_does_not_have_is_refused_if_named(install: Any) -> None:
    install("toy_lost")
    with pytest.raises(KernelError, match=r"replaces torch.nn.functional.relu_of_tomorrow, which cannot be found"):
        fit_tiny([Kernels("toy_lost")])


def test_a_kernel_that_replaces_nothing_does_nothing_and_says_so(
    install: Any, caplog: pytest.LogCaptureFixture
) -> None:
    install("toy_bare")
    assert_same(fit_tiny([Kernels("toy_bare")])[0], fit_tiny([])[0])
    assert "'toy_bare', which replaces no function of torch" in caplog.text
    assert "forge.kernels.toy_bare" in caplog.text


# ---------------------------------------------------------------------------------------------------------------------
# By one measurement


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`auto` on the CPU, with seconds that a test sets: with kernels, where a step is 1 second as written."""
    clock: dict[str, Any] = {"with kernels": 0.5, "measured": 0}

    def seconds(work: Callable[[], Any], device: torch.device) -> float:
        work()
        clock["measured"] += 1
        return clock["with kernels"] if (F.relu, F.linear, F.layer_norm) != ITSELF else 1.0

    monkeypatch.setattr(module, "_seconds", seconds)
    monkeypatch.setattr(Kernels, "_acts_on", lambda self, device: True)
    return clock


@pytest.mark.parametrize(("seconds", "used"), [(0.97, True), (0.99, False), (2.0, False)])
def test_the_whole_step_decides_once(
    install: Any, clock: dict[str, Any], seconds: float, used: bool, caplog: pytest.LogCaptureFixture
) -> None:
    install("toy", "toy_linear")
    clock["with kernels"] = seconds
    caplog.set_level(logging.INFO, "forge")
    fit_tiny([Kernels()], **FOUR)
    assert ran().count("toy") == 3 + 4 * used  # tried once, timed twice, then in every update
    assert clock["measured"] == 4
    assert f"take 1000 ms as written, and {seconds * 1e3:g} ms with toy, toy_linear" in caplog.text


def test_measuring_leaves_no_trace_in_the_run(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "_acts_on", lambda self, device: True)
    monkeypatch.setattr(module, "LEAST_GAIN", 2.0)  # nothing is kept
    install("toy", "toy_linear")
    ours, _ = fit_tiny([Kernels()])
    assert set(ran()) == {"toy", "toy_linear"}
    assert_same(ours, fit_tiny([])[0])


@pytest.mark.parametrize(
    ("name", "why"), [("toy_wrong", r"the loss is \S+ with kernels, and"), ("toy_broken", "no such instruction")]
)
def test_kernels_that_are_wrong_or_fail_are_not_used(
    install: Any, clock: dict[str, Any], name: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(name)
    ours, _ = fit_tiny([Kernels()])
    (line,) = told(caplog)
    assert line.startswith("kernels: the first batch could not be measured, and runs as written")
    assert re.search(why, line)
    assert_same(ours, fit_tiny([])[0])


def test_a_compiled_step_is_not_measured(install: Any, clock: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    install("toy")
    caplog.set_level(logging.INFO, "forge")
    fit_tiny([Kernels(), Compile(backend="aot_eager")], max_updates=1)
    assert ran() == []
    assert "kernels.use=auto: a compiled step is not measured and runs as written. Name kernels." in told(caplog)


def on_one_rank() -> list[str]:
    """A fit under `auto` on one of several ranks."""
    found, others = entries("toy"), registry.installed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "installed", lambda kind: found if kind == "kernel" else others(kind))
        patch.setattr(Kernels, "_acts_on", lambda self, device: True)
        fit_tiny([DDP(), Kernels()], **FOUR)
    return ran()


@pytest.mark.slow
def test_several_ranks_run_as_written() -> None:
    assert ranks(2)(on_one_rank) == [[], []]


def test_a_resumed_run_uses_the_kernels_that_it_began_with(
    install: Any, clock: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install("toy", "toy_linear")

    def run(folder: str, **options: Any) -> Any:
        plugins = [Kernels(), Checkpoint(every="2 updates", keep=9)]
        return fit_tiny(plugins, max_epochs=None, max_updates=6, run_dir=tmp_path / folder, **options)[0]

    straight = run("straight")
    CALLS.clear()
    clock.update({"with kernels": 2.0, "measured": 0})  # would decide otherwise now
    half = tmp_path / "straight" / "checkpoints" / "update-00000002"
    resumed = run("resumed", resume=half)
    assert clock["measured"] == 0
    assert set(ran()) == {"toy", "toy_linear"}
    assert_same(resumed, straight)
    install("toy")
    run("without", resume=half)
    assert "the resumed run used toy_linear, which replaces nothing now" in caplog.text
