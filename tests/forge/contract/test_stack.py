"""The stack: everything that can be wrong with it stops the run before any work, in one message that names the fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge
from forge.config.build import make_plugins
from forge.contract.stack import Stack
from forge_plugins import Accumulate, Clip
from tests.support.tasks import Classifier, fit, make_batches, noting


def plugin(name: str = "Sample", **body: Any) -> forge.Plugin:
    return type(name, (forge.Plugin,), body)()


def resolved(*plugins: forge.Plugin) -> list[str]:
    stack = Stack(plugins)
    stack.resolve()
    return stack.names


def assert_refused(message: str, *plugins: forge.Plugin) -> None:
    """The stack is refused, and no work was done for it."""
    worked = []

    class Watched(Classifier):
        def configure_optimizers(self) -> Any:
            worked.append("work")
            return super().configure_optimizers()

    with pytest.raises(forge.StackError, match=message):
        fit(Watched(), plugins=list(plugins))
    assert not worked


def observes(self: Any, step: Any) -> None: ...


def asks_for_trainer(self: Any, trainer: Any) -> None: ...


def has_a_default(self: Any, step: Any = None) -> None: ...


def yields(self: Any, step: Any) -> Any:
    yield


def around_the_end(self: Any, trainer: Any) -> Any:
    yield


@pytest.mark.parametrize(
    ("message", "body"),
    [
        ("forge_step_ende, which is no hook.*Did you mean 'forge_step_end'", {"forge_step_ende": observes}),
        ("forge_step_end is not marked. Put @forge.hookimpl above it", {"forge_step_end": observes}),
        (
            "asks for 'trainer', which it does not get. It can take: step",
            {"forge_step_end": forge.hookimpl(asks_for_trainer)},
        ),
        ("gives 'step' a default", {"forge_step_end": forge.hookimpl(has_a_default)}),
        ("tryfirst or trylast", {"forge_step_end": forge.hookimpl(tryfirst=True)(lambda self, step: None)}),
        ("has no yield", {"forge_train_step": forge.hookimpl(wrapper=True)(lambda self, step: None)}),
        ("not marked as a wrapper", {"forge_train_step": forge.hookimpl(yields)}),
        ("forge_end cannot be wrapped", {"forge_end": forge.hookimpl(wrapper=True)(around_the_end)}),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused(message: str, body: dict[str, Any]) -> None:
    assert_refused(message, plugin(**body))


def test_a_misspelt_hook_on_the_task_is_refused_too() -> None:
    class Typo(Classifier):
        def forge_step_edn(self, step: Any) -> None: ...

    with pytest.raises(forge.StackError, match=r"the task Typo defines forge_step_edn.*'forge_step_end'"):
        fit(Typo())


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(forge.RecipeError, match=r"Clip has no option 'max_nrom'\. Did you mean 'max_norm'"):
        Clip(max_nrom=1.0)


def test_an_option_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(forge.RecipeError, match=r"Accumulate.window is 2.5 \(float\), but it takes int"):
        Accumulate(2.5)


def test_the_first_option_goes_by_position_and_only_once() -> None:
    assert Clip(0.5).config.max_norm == 0.5
    with pytest.raises(forge.RecipeError, match="twice"):
        Clip(0.5, max_norm=1.0)
    with pytest.raises(forge.RecipeError, match="only its first option by position"):
        Clip(0.5, 1.0)


class OwnsA(forge.Plugin):
    @forge.hookimpl
    def forge_plan_step(self) -> int:
        return 1


def test_two_owners_of_one_action_are_refused_by_name() -> None:
    assert_refused("'accumulate' and 'owns_a' both own forge_plan_step", OwnsA(), Accumulate(2))


def test_a_task_is_an_owner_like_any_other() -> None:
    class Owning(Classifier):
        @forge.hookimpl
        def forge_plan_step(self) -> int:
            return 1

    with pytest.raises(forge.StackError, match="'accumulate' and 'task' both own"):
        fit(Owning(), plugins=[Accumulate(2)])


def test_ownership_is_per_instance() -> None:
    quiet = OwnsA()
    quiet.forge_plan_step = None  # pyright: ignore[reportAttributeAccessIssue]
    assert fit(plugins=[quiet, Accumulate(2)]).updates == 2


def test_a_requirement_is_met_by_a_name_or_a_provider() -> None:
    provider = plugin("Provider", provides=("thing",))
    assert resolved(plugin(requires=("thing", "provider")), provider) == ["sample", "provider"]


OTHER = plugin("Other", provides=("y",))


@pytest.mark.parametrize(
    ("message", "plugins"),
    [
        ("'sample' and 'other' both provide 'y'", [plugin(provides=("y",)), OTHER]),
        ("'sample' requires 'grad_scaler', which nothing.*-p grad_scaler", [plugin(requires=("grad_scaler",))]),
        (
            r"requires 'grad_scaler', which nothing in this stack is or provides\. Use amp\.dtype=fp16\.",
            [plugin(requires={"grad_scaler": "Use amp.dtype=fp16."})],
        ),
        ("'sample' cannot run together with 'other'", [plugin(conflicts=("y",)), OTHER]),
        (
            "^'sample' cannot run together with 'other', which brings 'y'. Set other.y=false.$",
            [plugin(conflicts={"y": "Set other.y=false."}), OTHER],
        ),
        ("'a' -> 'b' -> 'a'", [plugin("A", after=("b",)), plugin("B", after=("a",)), plugin("C")]),
        ("Two plugins are called 'clip'.*'clip@second'", [Clip(1.0), Clip(2.0)]),
    ],
)
def test_plugins_that_cannot_stand_together_are_refused_with_what_to_do(message: str, plugins: list[Any]) -> None:
    assert_refused(message, *plugins)


def test_a_conflict_is_with_what_is_provided() -> None:
    assert resolved(plugin(conflicts=("y",)), plugin("Other")) == ["sample", "other"]


def test_before_and_after_move_a_plugin_and_nothing_else() -> None:
    a, b, c = plugin("A"), plugin("B", before=("a",)), plugin("C")
    assert resolved(a, b, c) == ["b", "a", "c"]
    assert resolved(plugin("A", after=("c",)), plugin("B"), plugin("C")) == ["b", "c", "a"]


@given(st.permutations(["a", "b", "c", "d"]), st.sets(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd"))))
def test_sorting_obeys_every_edge_or_names_a_cycle_and_is_stable(order: list[str], edges: set[tuple[str, str]]) -> None:
    edges = {(first, second) for first, second in edges if first != second}
    plugins = [plugin(name.upper(), after=tuple(first for first, second in edges if second == name)) for name in order]
    try:
        names = resolved(*plugins)
    except forge.StackError:
        assert _has_cycle(edges)
        return
    assert all(names.index(first) < names.index(second) for first, second in edges)
    assert edges or names == list(order)


def _has_cycle(edges: set[tuple[str, str]]) -> bool:
    reach = set(edges)
    for _ in range(4):
        reach |= {(a, d) for a, b in reach for c, d in reach if b == c}
    return any(a == b for a, b in reach)


def test_two_of_one_kind_stand_together_under_names_of_their_own() -> None:
    second = plugin("Other")
    second.name = "clip@second"
    assert resolved(Clip(1.0), second) == ["clip", "clip@second"]


def test_what_is_no_plugin_is_refused_with_what_to_pass() -> None:
    with pytest.raises(forge.StackError, match=r"decorate it with @forge.on"):
        make_plugins([lambda step: None])
    with pytest.raises(forge.StackError, match="write plugins="):
        make_plugins(Clip(1.0))
    with pytest.raises(forge.StackError, match="3 is no plugin"):
        make_plugins([3])


def test_printed_order_is_call_order_is_outermost_to_innermost() -> None:
    order: list[str] = []

    def wrapping(label: str) -> forge.Plugin:
        def around(self: Any, step: Any) -> Any:
            order.append(f"{label} in")
            result = yield
            order.append(f"{label} out")
            return result

        def end(self: Any, step: Any) -> None:
            order.append(f"{label} end")

        body = {"forge_train_step": forge.hookimpl(wrapper=True)(around), "forge_step_end": forge.hookimpl(end)}
        return plugin(label.capitalize(), **body)

    fit(max_updates=1, plugins=[wrapping("first"), wrapping("second")])
    assert order == ["first in", "second in", "second out", "first out", "first end", "second end"]


def test_an_owner_that_forgets_to_return_true_is_told_so() -> None:
    class Forgets(forge.Plugin):
        @forge.hookimpl
        def forge_train_step(self, step: forge.Step) -> None:
            step.run_window()
            step.finish()

    with pytest.raises(RuntimeError, match="Return True from the owner"):
        fit(plugins=[Forgets()])


def test_an_error_in_a_plugin_names_plugin_hook_and_update() -> None:
    class Breaks(forge.Plugin):
        @forge.hookimpl
        def forge_step_end(self, step: forge.Step) -> None:
            if step.index == 2:
                raise KeyError("lost")

    with pytest.raises(KeyError) as caught:
        fit(plugins=[Clip(1.0), Breaks()])
    assert caught.value.__notes__ == ["forge: raised in plugin 'breaks', hook forge_step_end, at update 3."]


def test_an_error_through_a_wrapper_is_not_blamed_on_it() -> None:
    class Around(forge.Plugin):
        @forge.hookimpl(wrapper=True)
        def forge_forward(self) -> Any:
            return (yield)

    class Breaks(Classifier):
        def training_step(self, batch: Any) -> Any:
            raise KeyError("lost")

    with pytest.raises(KeyError) as caught:
        fit(Breaks(), plugins=[Around()])
    assert "Breaks.training_step" in caught.value.__notes__[0]


@pytest.mark.parametrize("wrapped", [False, True])
def test_stop_iteration_out_of_a_step_is_an_error(wrapped: bool) -> None:
    class Around(forge.Plugin):
        @forge.hookimpl(wrapper=True)
        def forge_forward(self) -> Any:
            return (yield)

    class Stops(Classifier):
        def training_step(self, batch: Any) -> Any:
            return next(iter([]))

    with pytest.raises(forge.TaskError, match=r"Stops.training_step.*raised StopIteration, which is an error"):
        fit(Stops(), plugins=[Around()] if wrapped else [])


def test_options_are_documented_by_the_strings_under_them() -> None:
    from forge import options

    documented = options.of_config(Clip.Config)
    assert documented[0].name == "max_norm"
    assert documented[0].doc.startswith("Largest allowed global gradient norm")


class Nested(forge.Plugin):
    @dataclass(kw_only=True, slots=True)
    class Best:
        monitor: str
        keep: int = 1

    @dataclass(kw_only=True, slots=True)
    class Config:
        rate: float = 1.0
        best: Nested.Best | None = None
        layers: tuple[str, ...] = ()


def test_a_nested_config_converts_what_yaml_gives_without_loss() -> None:
    made = Nested(rate=2, best={"monitor": "val/loss"}, layers=["a", "b"])
    assert (made.config.rate, made.config.layers) == (2.0, ("a", "b"))
    assert isinstance(made.config.rate, float)
    assert made.config.best == Nested.Best(monitor="val/loss")


class TestCallbacks:
    def test_an_unknown_event_is_refused_with_the_nearest(self) -> None:
        with pytest.raises(forge.StackError, match="'forge_step_end'"):
            forge.on("step_ende")

    def test_an_action_is_refused_with_what_to_write(self) -> None:
        with pytest.raises(forge.StackError, match="is an action, not an event; write a Plugin"):
            forge.on("backward")

    def test_an_interval_needs_a_step_to_count(self) -> None:
        with pytest.raises(forge.StackError, match="an interval counts finished updates"):
            forge.on("log", every="2 updates")

    def test_a_callback_takes_any_of_the_events_arguments(self) -> None:

        watch, seen = noting("boundary", lambda trainer: trainer.progress.update, every="2 updates")

        @forge.on("log")
        def sink(metrics: dict[str, Any]) -> None:
            seen.append(sorted(metrics))

        fit(plugins=[watch, sink], train=make_batches(4))
        names = ["train/accuracy", "train/accuracy_epoch", "train/loss", "train/loss_epoch"]
        assert seen == [2, ["lr", *names], 4]

    def test_it_observes_unless_it_says_that_it_changes_the_run(self) -> None:
        assert forge.on("step_end")(lambda step: None).observer
        assert not forge.on("step_end", mutates=True)(lambda step: None).observer


def test_a_stack_without_recipe_and_without_plugins_uses_neither() -> None:
    assert len(forge.Trainer(max_epochs=1, plugins=[]).stack) == 0
