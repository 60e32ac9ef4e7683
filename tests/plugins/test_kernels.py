"""The plugin `kernels`: what it swaps, when, and that it leaves everything as it was."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import registry
from forge.errors import KernelError, RecipeError, StackError, TaskError
from forge.testing import TinyTask, assert_same_weights, check_plugin, fit_tiny, tiny_batches
from forge_kernels import patch as swapping
from forge_kernels.call_pattern import RecordedCall
from forge_kernels.timing import Timing
from forge_plugins import DDP, Checkpoint, Compile, Remat
from forge_plugins.kernels import Kernels
from tests.conftest import PROFILE
from tests.support import toy_kernels
from tests.support.lasting_ranks import ranks
from tests.support.toy_kernels import CALLS, LINEAR, RELU, FastLinear, entries

RELU_ITSELF, LAYER_NORM_ITSELF = F.relu, F.layer_norm
FOUR: dict[str, Any] = {"train": tiny_batches([8] * 4), "max_updates": 4, "log_every": 1, "validate_every": None}
"""Four updates with one shape, and nothing else."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    CALLS.clear()
    yield
    assert F.relu is RELU_ITSELF


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have these toys installed, and nothing else."""
    others = registry.installed

    def install(*names: str) -> None:
        found = entries(*names)
        monkeypatch.setattr(registry, "installed", lambda kind: found if kind == "kernel" else others(kind))

    return install


class Clock:
    """In a stopwatch's place: the first work, which is as written, takes 1 ms, the others what they are told to."""

    ms: tuple[float, ...] = (0.5,)
    measured = 0

    def __init__(self, device: torch.device, quick: bool = False):
        pass

    def __call__(self, *works: Any) -> list[Timing]:
        type(self).measured += 1
        for work in works:
            work()
        return [Timing(ms / 1e3, ms / 1e3, ms / 1e3) for ms in (1.0, *self.ms)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Clock]:
    """`auto` on the CPU, with times that a test sets, and a cache of its own."""

    class Own(Clock):
        pass

    monkeypatch.setattr("forge_plugins.kernels.Stopwatch", Own)
    monkeypatch.setattr(Kernels, "_acts_on", lambda self, device: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Own


def net(task: Any) -> Any:
    return task.net


def ran() -> list[str]:
    return [name for name, _ in CALLS]


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
    install("toy", "toy_module")
    monkeypatch.setattr(Kernels, "_acts_on", lambda self, device: True)
    fit_tiny([Kernels("all")], max_updates=1)
    assert set(ran()) == {"toy", "toy_module"}
    CALLS.clear()
    fit_tiny([Kernels("all", leave_out="toy")], max_updates=1)
    assert set(ran()) == {"toy_module"}


def test_after_an_error_in_the_step_everything_is_put_back(install: Any) -> None:
    install("toy", "toy_module")

    class Fails(TinyTask):
        def training_step(self, batch: Any) -> Any:
            super().training_step(batch)
            raise ZeroDivisionError

    task = Fails()
    before = list(net(task))
    with pytest.raises(ZeroDivisionError):
        fit_tiny([Kernels(["toy", "toy_module"])], task=task)
    assert set(ran()) == {"toy", "toy_module"}
    assert F.relu is RELU_ITSELF
    assert [a is b for a, b in zip(net(task), before, strict=True)] == [True] * len(before)


def test_another_trainer_inside_a_step_is_left_alone(install: Any) -> None:
    install("toy", "toy_rival")

    class Inner(TinyTask):
        check_first_batch = False  # it runs modules again

    class Outer(Inner):
        def training_step(self, batch: Any) -> Any:
            fit_tiny([Kernels("toy_rival")], task=Inner(), max_updates=1)
            CALLS.append(("inside", ()))
            return super().training_step(batch)

    fit_tiny([Kernels("toy")], task=Outer(), max_updates=1)
    assert ran() == ["toy_rival", "inside", "toy"]


def test_a_module_is_swapped_with_its_parameters_and_names(install: Any) -> None:
    install("toy_module")
    task, during = TinyTask(), {}
    names, first, last = list(task.state_dict()), net(task)[0], net(task)[4]

    @forge.on("step_end")
    def look(step: forge.Step) -> None:
        layers = net(step.trainer.task)
        during.update(kinds=[type(layers[0]), layers[4] is last], weight=layers[0].weight is first.weight)
        during.update(names=list(step.trainer.task.state_dict()))

    fit_tiny([Kernels("toy_module"), look], task=task, max_updates=2)
    assert during == {"kinds": [FastLinear, True], "weight": True, "names": names}
    assert net(task)[0] is first
    theirs, _ = fit_tiny([], max_updates=2)
    assert_same_weights(task, theirs)


def test_a_module_with_other_parameters_is_refused(install: Any) -> None:
    install("toy_strange")
    task = TinyTask()
    first = net(task)[0]
    with pytest.raises(KernelError, match=r"'toy_strange' would replace net.0 by a Stranger with other"):
        fit_tiny([Kernels("toy_strange")], task=task)
    assert net(task)[0] is first


def test_a_module_with_hooks_stays(install: Any) -> None:
    install("toy_module")
    task = TinyTask()
    net(task)[0].register_forward_hook(lambda *args: None)
    fit_tiny([Kernels("toy_module")], task=task, max_updates=1)
    assert ran() == []


def test_what_is_computed_again_runs_on_the_kernel_too(install: Any) -> None:
    install("toy")
    ours, _ = fit_tiny([Kernels("toy"), Remat(modules="net")], max_updates=2)
    assert ran() == ["toy"] * 4
    theirs, _ = fit_tiny([Kernels("toy")], max_updates=2)
    assert_same_weights(ours, theirs)


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
# auto


def test_off_cuda_nothing_is_swapped_and_the_log_says_so_once(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    install("toy", "toy_module")
    caplog.set_level(logging.INFO, "forge")
    for use in ("auto", "all"):
        ours, _ = fit_tiny([Kernels(use)])
        assert_same_weights(ours, fit_tiny([])[0])
    assert ran() == []
    said = [record.getMessage() for record in caplog.records if "kernels" in record.getMessage()]
    assert said == ["kernels: nothing is swapped: they run on CUDA, and this run is on cpu."] * 2


def test_auto_uses_a_kernel_that_it_measured_as_faster(install: Any, clock: type[Clock]) -> None:
    install("toy")
    fit_tiny([Kernels("auto")], train=tiny_batches([8, 8, 5]), max_epochs=1, val=tiny_batches([8, 4]))
    assert clock.measured == 1
    # measured, then two updates with batches of 8, and one batch of 8 of the validation; other shapes run as written
    assert set(CALLS) == {("toy", (8, 8))}
    assert len(CALLS) == 2 + 2 + 1


@pytest.mark.parametrize(("ms", "used"), [((0.5,), True), ((0.96,), True), ((0.98,), False), ((2.0,), False)])
def test_auto_needs_a_gain_of_three_percent(install: Any, clock: type[Clock], ms: Any, used: bool) -> None:
    install("toy")
    clock.ms = ms
    fit_tiny([Kernels()], max_updates=2)
    assert (len(CALLS) > 2) is used


def test_auto_takes_the_fastest_of_several(install: Any, clock: type[Clock]) -> None:
    install("toy", "toy_rival")
    clock.ms = (0.9, 0.5)
    fit_tiny([Kernels()], max_updates=2)
    assert ran()[-2:] == ["toy_rival"] * 2


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("toy_wrong", "its first result is off by"),
        ("toy_fussy", "it does not take this call"),
        ("toy_broken", "it fails: RuntimeError: no such instruction"),
    ],
)
def test_auto_does_not_count_a_kernel_that_is_wrong(
    install: Any, clock: type[Clock], name: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(name)
    caplog.set_level(logging.INFO, "forge")
    ours, _ = fit_tiny([Kernels()])
    assert clock.measured == 0
    assert f"{name}: {why}" in caplog.text
    assert_same_weights(ours, fit_tiny([])[0])


def test_looking_and_measuring_leave_no_trace_in_the_run(install: Any, clock: type[Clock]) -> None:
    install("toy", "toy_module")
    clock.ms = (2.0,)
    ours, _ = fit_tiny([Kernels()])
    assert clock.measured == 2
    assert_same_weights(ours, fit_tiny([])[0])


def test_auto_swaps_a_faster_module_before_the_first_update(install: Any, clock: type[Clock]) -> None:
    install("toy_module")
    task = TinyTask()
    first, kinds = net(task)[0], []

    @forge.on("step_end")
    def look(step: forge.Step) -> None:
        kinds.append(type(net(step.trainer.task)[0]))

    fit_tiny([Kernels(), look], task=task, max_updates=2)
    assert kinds == [FastLinear] * 2
    assert net(task)[0] is first
    assert_same_weights(task, fit_tiny([], max_updates=2)[0])


def test_the_table_says_what_was_measured_and_what_is_used(
    install: Any, clock: type[Clock], caplog: pytest.LogCaptureFixture
) -> None:
    install("toy")
    caplog.set_level(logging.INFO, "forge")
    fit_tiny([Kernels()], max_updates=1)
    (told,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("kernels against")]
    head, columns, row = told.splitlines()
    assert head == "kernels against what they replace on cpu, forward and backward, measured now:"
    assert columns.split("  ")[1] == "call"
    assert row.split() == ["relu", "8×8", "float32", "1", "1", "ms", "toy", "0.5", "ms", "toy"]


@pytest.mark.slow
def test_auto_under_compile_measures_compiled_code(
    install: Any, clock: type[Clock], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("toy")
    torch._dynamo.reset()
    compiled, real = [], torch.compile

    def compile(function: Any, **options: Any) -> Any:
        compiled.append(function.__name__)
        return real(function, **{**options, "backend": "aot_eager"})

    monkeypatch.setattr(torch, "compile", compile)
    caplog.set_level(logging.INFO, "forge")
    plugins = [Compile(backend="aot_eager", fullgraph=True), Kernels()]
    _, result = fit_tiny(plugins, **FOUR)
    assert sorted(compiled) == ["measured", "measured", "training_step"]
    assert "kernels against torch.compile" in caplog.text
    assert result.metrics["compile/graphs"] == 1
    assert result.metrics["compile/recompiles"] == 0
    assert ran()[-4:] == ["toy"] * 4
    assert "forge_toys" not in caplog.text


def test_each_optimizers_first_batch_is_looked_at(install: Any, clock: type[Clock]) -> None:
    install("toy")
    from forge.testing import TinyGAN

    class Both(TinyGAN):
        def training_step(self, batch: Any, name: str) -> Any:
            F.relu(batch[0][:, : 3 if name == "discriminator" else 2])
            return super().training_step(batch, name)

    fit_tiny([Kernels()], task=Both(), max_updates=1)
    assert clock.measured == 2


def test_a_first_batch_that_fails_fails_in_the_runs_own_forward(install: Any, clock: type[Clock]) -> None:
    install("toy")

    class Fails(TinyTask):
        def training_step(self, batch: Any) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fit_tiny([Kernels()], task=Fails())
    assert "kernels" not in "".join(getattr(caught.value, "__notes__", []))


def test_mistakes_in_a_replaced_loss_are_still_refused(clock: type[Clock], monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.support.kernel_kit  # noqa: F401  (it mends the interpreter)

    pytest.importorskip("triton")
    found = entries(cross_entropy="forge_kernels.ops.cross_entropy:CROSS_ENTROPY")
    others = registry.installed
    monkeypatch.setattr(registry, "installed", lambda kind: found if kind == "kernel" else others(kind))

    class Normalises(TinyTask):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).softmax(1)

    with pytest.raises(TaskError, match=r"cross_entropy got probabilities \(every row sums to 1\)"):
        fit_tiny([Kernels(cache=False)], task=Normalises(), max_updates=1)
    fit_tiny([Kernels(cache=False)], max_updates=1)
    assert clock.measured == 1


def test_auto_sees_through_blocks_that_are_computed_again(install: Any, clock: type[Clock]) -> None:
    install("toy")
    ours, _ = fit_tiny([Remat(modules="net"), Kernels(cache=False)], max_updates=2)
    assert clock.measured == 1
    assert ran()[-4:] == ["toy"] * 4
    theirs, _ = fit_tiny([Kernels("toy")], max_updates=2)
    assert_same_weights(ours, theirs)


def test_verbs_without_training_run_as_written_under_auto(install: Any, clock: type[Clock]) -> None:
    install("toy")
    forge.Trainer(plugins=[Kernels()], device="cpu").validate(TinyTask(), tiny_batches([4]))
    assert ran() == []


def on_one_rank() -> dict[str, Any]:
    """A fit under `auto` on one of several ranks: who measured what, and what ran."""
    others, found = registry.installed, entries("toy", "toy_module")
    CALLS.clear()
    Clock.measured = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "installed", lambda kind: found if kind == "kernel" else others(kind))
        patch.setattr("forge_plugins.kernels.Stopwatch", Clock)
        patch.setattr(Kernels, "_acts_on", lambda self, device: True)
        options: dict[str, Any] = {"max_updates": 4, "validate_every": None}
        task, _ = fit_tiny([DDP(), Kernels(cache=False)], train=tiny_batches([7] * 4), **options)
    weights = {name: value.detach().clone() for name, value in task.named_parameters()}
    return {"measured": Clock.measured, "calls": CALLS[-8:], "weights": weights}


def test_the_first_rank_measures_and_all_use_the_same() -> None:
    first, second = ranks(2)(on_one_rank)
    assert (first["measured"], second["measured"]) == (3, 0)  # relu on shares of 3 and 4 samples, and the module
    assert first["calls"] == [("toy_module", (3, 6)), ("toy", (3, 8))] * 4
    assert second["calls"] == [("toy_module", (4, 6)), ("toy", (4, 8))] * 4
    assert_same_weights(first["weights"], second["weights"])


# ---------------------------------------------------------------------------------------------------------------------
# Known from before


def test_a_second_run_knows_what_the_first_one_measured(
    install: Any, clock: type[Clock], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    install("toy")
    fit_tiny([Kernels()], max_updates=1)
    CALLS.clear()
    clock.ms = (2.0,)  # would decide otherwise now
    caplog.set_level(logging.INFO, "forge")
    fit_tiny([Kernels()], max_updates=2)
    assert clock.measured == 1
    assert ran() == ["toy"] * 2
    assert "known from an earlier run" in caplog.text
    assert (tmp_path / "cache" / "forge" / "kernels.json").is_file()


def test_without_a_cache_each_run_measures(install: Any, clock: type[Clock], tmp_path: Path) -> None:
    install("toy")
    for _ in range(2):
        fit_tiny([Kernels(cache=False)], max_updates=1)
    assert clock.measured == 2
    assert not (tmp_path / "cache").exists()


def test_the_cache_can_be_a_folder_of_ones_own(install: Any, clock: type[Clock], tmp_path: Path) -> None:
    install("toy")
    fit_tiny([Kernels(cache=str(tmp_path / "own"))], max_updates=1)
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["kernels.json"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"form": 1, "choices": 3}', '{"form": 1, "choices": {"KEY": 7}}'])
def test_a_damaged_cache_is_measured_anew(install: Any, clock: type[Clock], tmp_path: Path, damage: str) -> None:
    install("toy")
    folder = tmp_path / "own"
    fit_tiny([Kernels(cache=str(folder))], max_updates=1)
    (key,) = json.loads((folder / "kernels.json").read_text())["choices"]
    (folder / "kernels.json").write_text(damage.replace("KEY", key))
    fit_tiny([Kernels(cache=str(folder))], max_updates=1)
    assert clock.measured == 2
    assert key in json.loads((folder / "kernels.json").read_text())["choices"]


def test_a_kernel_whose_source_changed_is_measured_again(
    install: Any, clock: type[Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("toy")
    fit_tiny([Kernels()], max_updates=1)
    monkeypatch.setattr("forge_kernels.discovery.version", lambda kernel: "another")
    fit_tiny([Kernels()], max_updates=1)
    assert clock.measured == 2


def test_a_resumed_run_uses_the_kernels_that_it_began_with(install: Any, clock: type[Clock], tmp_path: Path) -> None:
    install("toy", "toy_module")

    def run(folder: str, updates: int, **options: Any) -> Any:
        plugins = [Kernels(cache=False), Checkpoint(every="2 updates", keep=9)]
        return fit_tiny(plugins, max_epochs=None, max_updates=updates, run_dir=tmp_path / folder, **options)[0]

    clock.ms = (0.5,)
    straight = run("straight", 6)
    CALLS.clear()
    clock.ms, clock.measured = (2.0,), 0
    resumed = run("resumed", 6, resume=tmp_path / "straight" / "checkpoints" / "update-00000002")
    assert clock.measured == 0
    assert set(ran()) == {"toy", "toy_module"}
    assert_same_weights(resumed, straight)


def test_a_run_whose_kernel_is_gone_is_not_resumed_silently(install: Any, clock: type[Clock], tmp_path: Path) -> None:
    install("toy")

    def run(**options: Any) -> None:
        fit_tiny([Kernels(), Checkpoint(every="1 updates")], max_epochs=None, run_dir=tmp_path / "run", **options)

    run(max_updates=1)
    install("toy_fussy")
    with pytest.raises(StackError, match="used the kernel 'toy', which is not available now"):
        run(max_updates=2, resume="auto")


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


def test_two_named_kernels_for_one_function_are_refused(install: Any) -> None:
    install("toy", "toy_rival")
    with pytest.raises(RecipeError, match=r"'toy' and 'toy_rival' both replace torch.nn.functional.relu"):
        fit_tiny([Kernels(["toy", "toy_rival"])])


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


LEFT_OUT = ["cost", "a fit with accumulation", "a fit with two optimizers"] if PROFILE == "quick" else []
"""A fit with both accumulation and two optimizers stands for either."""


@pytest.mark.parametrize("use", [pytest.param("toy", marks=pytest.mark.slow), ["toy", "toy_module"]], ids=str)
def test_it_keeps_the_contract_when_it_swaps(install: Any, use: Any) -> None:
    install("toy", "toy_module")
    check_plugin(lambda: Kernels(use), leave_out=LEFT_OUT)
    assert "toy" in ran()


@pytest.mark.slow
def test_it_keeps_the_contract_under_auto(install: Any, clock: type[Clock]) -> None:
    install("toy", "toy_module")
    check_plugin(lambda: Kernels(cache=False))
    assert clock.measured > 0


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


# ---------------------------------------------------------------------------------------------------------------------
# Its parts


def test_stand_ins_of_several_leave_in_any_order() -> None:
    def one(*args: Any) -> None: ...

    def two(*args: Any) -> None: ...

    first, second = swapping.StandIns({RELU: one}), swapping.StandIns({RELU: two})
    first.__enter__()
    second.__enter__()
    assert F.relu is two
    assert swapping.original(RELU) is RELU_ITSELF
    first.__exit__()
    assert F.relu is two
    second.__exit__()
    assert F.relu is RELU_ITSELF


def test_torch_compile_looks_into_an_earlier_stand_in() -> None:
    from torch._dynamo import trace_rules

    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    (relu,) = toy_kernels.TOY.replaces
    trace_rules.get_torch_obj_rule_map.cache_clear()
    torch._dynamo.reset()
    try:
        swapping.build_dynamo_table(soon=True)
        with swapping.StandIns({RELU: swapping.always(RELU, relu.call)}):  # pyright: ignore
            torch.compile(lambda x: F.relu(x), backend=keep, fullgraph=True)(torch.randn(3))
    finally:
        trace_rules.get_torch_obj_rule_map.cache_clear()
    assert "forge_toys.relu" in graphs[0].code


def test_a_call_is_the_same_after_it_was_written_down() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        call = RecordedCall.of(
            RELU, (x, (6,), None, torch.randint(3, 9, (4,))), {"dtype": torch.float16, "eps": 1e-5, "b": [1]}
        )
    again = RecordedCall.from_data(json.loads(json.dumps(call.as_data())))
    assert again == call
    assert again.autocast == torch.bfloat16


@pytest.mark.parametrize("view", ["t", "[:, ::2]", "expand", "[2]"])
def test_a_call_is_made_anew_with_the_same_shapes_and_strides(view: str) -> None:
    x = torch.randn(4, 6)
    tensor = {"t": x.t(), "[:, ::2]": x[:, ::2], "expand": x[:1].expand(5, 6), "[2]": x[2]}[view]
    numbers = torch.randint(3, 9, (100,))
    (made, whole), _ = RecordedCall.of(RELU, (tensor.requires_grad_(), numbers), {}).make(torch.device("cpu"))
    assert (made.shape, made.stride(), made.requires_grad) == (tensor.shape, tensor.stride(), True)
    assert whole.min() >= numbers.min()
    assert whole.max() <= numbers.max()
    assert whole.dtype == torch.int64


def test_modules_are_found_by_the_full_name_of_their_class() -> None:
    assert swapping.modules_of(TinyTask(), LINEAR) == ["net.0", "net.4"]
    assert swapping.modules_of(TinyTask(), "torch.nn.modules.linear.Bilinear") == []
