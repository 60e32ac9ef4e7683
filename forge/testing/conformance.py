"""check_plugin: does a plugin keep what the contract promises to everybody else in the stack?"""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forge import options
from forge.errors import StackError
from forge.hooks import hookimpl
from forge.plugin import Plugin
from forge.stack import check_hooks
from forge.state import Checkpoints, write_checkpoint
from forge.task import TaskModule
from forge.testing.tiny import TinyGAN, TinyTask, fit_tiny, tiny_batches
from forge.testing.weights import first_difference
from forge.trainer import FitResult, Trainer

Make = Callable[[], Plugin]
UPDATES = 7
"""Past the end of an epoch and into the next, with and without accumulation."""
CUT = 4
"""Where a fit is cut off and resumed: in the middle of an epoch."""


@dataclass(frozen=True, slots=True)
class Situation:
    """A kind of fit that every plugin meets sooner or later."""

    name: str
    task: Callable[[], TaskModule]
    window: int = 1


SITUATIONS = (
    Situation("a fit", TinyTask),
    Situation("a fit with accumulation", TinyTask, window=2),
    Situation("a fit with two optimizers", TinyGAN),
    Situation("a fit with two optimizers and accumulation", TinyGAN, window=2),
)


def check_plugin(make: Make, *, beside: Callable[[], Iterable[Plugin]] = tuple, leave_out: Iterable[str] = ()) -> None:
    """Raise AssertionError unless the plugin that `make` returns keeps the contract. One line is a whole test::

        def test_it_keeps_the_contract():
            check_plugin(lambda: MyPlugin(every="2 updates"))

    Give it options with which it acts within seven updates: what never runs cannot be judged. Checked are

    - the class: a docstring, a description under every option, hooks that forge knows and can call;
    - fits with one and with two optimizers, with and without accumulation, and validation and prediction, where there
      are neither optimizers nor a run folder: nothing raises;
    - `observer = True`: weights, counters and everybody else's metrics are the same without the plugin, bit for bit;
    - `forge_state_dict` returns plain data and tensors, and `forge_load_state_dict` takes them back;
    - a fit that was cut off and resumed ends in the weights of the straight one, bit for bit;
    - once run, task and plugin are forgotten, their memory is free again;
    - one object serves two runs in a row, and the second gives the weights of the first.

    `beside` makes the other plugins that this one `requires`. `leave_out` names situations that the plugin refuses on
    purpose, such as "a fit with two optimizers"; it should refuse them with a message of its own.
    """
    plugin = make()
    assert isinstance(plugin, Plugin), f"{plugin!r} is no forge.Plugin."
    assert make() is not plugin, "`make` returned one object twice; it must make a new plugin each time."
    check_class(plugin)
    situations = [situation for situation in SITUATIONS if situation.name not in set(leave_out)]
    assert situations, "Every situation was left out: there is nothing to check."
    for situation in situations:
        _check_situation(make, beside, situation)
    _check_evaluation(make, beside)
    _check_memory(make, beside, situations[0])
    _check_state(make, beside, situations[0])
    for situation in situations:
        _check_resume(make, beside, situation)


def check_class(plugin: Plugin) -> None:
    """The plugin's documentation and the form of its hooks: what can be judged without running it."""
    kind = type(plugin)
    try:
        check_hooks(plugin, f"plugin {plugin.name!r}")
    except StackError as error:
        raise AssertionError(str(error)) from error
    assert (kind.__doc__ or "").strip(), (
        f"{kind.__name__} has no docstring: write under `class` what it does, for `forge plugins {plugin.name}`."
    )
    bare = [option.name for option in options.of_config(kind.Config) if not option.doc]
    assert not bare, (
        f"{kind.__name__}.Config does not describe {', '.join(bare)}: write a string under each field, for "
        f"`forge plugins {plugin.name}`."
    )


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def _check_situation(make: Make, beside: Callable[[], Iterable[Plugin]], situation: Situation) -> None:
    plugin = make()
    with _surviving(plugin, situation.name):
        task, result = _fit([plugin, *beside()], situation)
    if plugin.observer:
        _check_observer(plugin, situation, (task, result), _fit(beside(), situation))
    with _surviving(plugin, f"{situation.name} with an object that served one already"):
        again, _ = _fit([plugin, *beside()], situation)
    difference = first_difference(again, task)
    assert difference is None, (
        f"{plugin.name!r} carries something from one run into the next, so {situation.name} ends elsewhere the second "
        f"time: {difference} Make what belongs to a run in forge_start, not in __init__."
    )


def _check_observer(
    plugin: Plugin,
    situation: Situation,
    watched: tuple[TaskModule, FitResult],
    alone: tuple[TaskModule, FitResult],
) -> None:
    claim = f"{plugin.name!r} says observer = True, but {situation.name} ends differently with it: "
    difference = first_difference(watched[0], alone[0])
    assert difference is None, f"{claim}{difference}"
    for name in ("updates", "epochs", "stop_reason"):
        ours, theirs = getattr(watched[1], name), getattr(alone[1], name)
        assert ours == theirs, f"{claim}{name} is {ours!r} instead of {theirs!r}."
    for name, value in alone[1].metrics.items():
        ours = watched[1].metrics.get(name)
        assert ours == value, f"{claim}the metric {name!r} is {ours!r} instead of {value!r}."


def _check_evaluation(make: Make, beside: Callable[[], Iterable[Plugin]]) -> None:
    for verb in ("validate", "predict"):
        plugin = make()
        with _surviving(plugin, f"trainer.{verb}(), where there are neither optimizers nor a run folder"):
            trainer = Trainer(plugins=[plugin, *beside()], seed=0, device="cpu")
            getattr(trainer, verb)(TinyTask(), tiny_batches())


def _check_memory(make: Make, beside: Callable[[], Iterable[Plugin]], situation: Situation) -> None:
    """After a second fit as many tensors are left as after the first, whatever was set up once for all."""

    def left_over() -> tuple[int, bool]:
        task = weakref.ref(_fit([make(), *beside()], situation)[0])
        gc.collect()
        return sum(1 for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)), task() is not None

    name = make().name
    (before, _), (after, lives) = left_over(), left_over()
    assert not lives, f"{name!r} keeps the task alive when the run, and the plugin itself, are forgotten."
    assert after <= before, (
        f"{name!r} leaves {after - before} tensors behind after {situation.name}: memory grows with every run. "
        "Look for a cache, a hook that was not removed, or what autograd was given to keep (detach it)."
    )


def _fit(plugins: Iterable[Plugin], situation: Situation, folder: Path | None = None) -> tuple[TaskModule, FitResult]:
    """A fit in a run folder, a temporary one unless it is given, so that sinks have somewhere to write."""
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return _fit(plugins, situation, Path(temporary))
    stack = list(plugins)
    if situation.window > 1 and not any(_owns(plugin, "forge_plan_step") for plugin in stack):
        stack.append(_Window(situation.window))
    return fit_tiny(stack, task=situation.task(), max_epochs=None, max_updates=UPDATES, run_dir=folder, resume="auto")


def _owns(plugin: Plugin, hook: str) -> bool:
    method = getattr(plugin, hook, None)
    return method is not None and not getattr(method, "forge_impl", {}).get("wrapper")


@contextmanager
def _surviving(plugin: Plugin, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(
            f"{plugin.name!r} does not survive {what}: {type(error).__name__}: {error}\n"
            + "\n".join(getattr(error, "__notes__", ()))
        ) from error


class _Window(Plugin):
    """Accumulate: the kit knows no other plugin, so it brings its own."""

    def __init__(self, window: int):
        super().__init__()
        self.name, self.window = "forge.testing.window", window

    @hookimpl
    def forge_plan_step(self) -> int:
        return self.window


# ---------------------------------------------------------------------------------------------------------------------
# State


def _check_state(make: Make, beside: Callable[[], Iterable[Plugin]], situation: Situation) -> None:
    plugin = make()
    gives, takes = (getattr(plugin, hook, None) is not None for hook in ("forge_state_dict", "forge_load_state_dict"))
    assert gives == takes, (
        f"{plugin.name!r} defines only {'forge_state_dict' if gives else 'forge_load_state_dict'}: state that is saved "
        "must be taken back, and the other way round. Define both."
    )
    if not gives:
        return
    giver, taker = _StateProbe(plugin), make()
    with _surviving(plugin, "giving its state away"):
        _fit([plugin, *beside(), giver], situation)
    if giver.state is None:
        return
    _check_plain(giver.state, f"forge_state_dict of {plugin.name!r}")
    probe = _StateProbe(taker, copy.deepcopy(giver.state))
    with _surviving(plugin, "taking its state back"):
        _fit([taker, *beside(), probe], situation)
    difference = _state_difference(probe.taken, giver.state, "state")
    assert not difference, (
        f"{plugin.name!r} does not take back what it gave away: after forge_load_state_dict its forge_state_dict has "
        f"{difference}."
    )


def _check_resume(make: Make, beside: Callable[[], Iterable[Plugin]], situation: Situation) -> None:
    plugin = make()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with _surviving(plugin, f"{situation.name} that is saved"):
            straight, _ = _fit([plugin, *beside(), _Saver()], situation, folder)
        saved = Checkpoints(folder / "checkpoints")
        for other in saved.all():  # the plugin may save as well
            saved.remove(other)
        saved.folder.mkdir(exist_ok=True)
        (folder / _Saver.FOLDER / saved.path(CUT).name).rename(saved.path(CUT))
        with _surviving(plugin, f"{situation.name} that is resumed at update {CUT}"):
            resumed, _ = _fit([make(), *beside(), _Saver()], situation, folder)
    difference = first_difference(resumed, straight)
    assert difference is None, (
        f"{situation.name.capitalize()} with {plugin.name!r} that is resumed at update {CUT} ends elsewhere: "
        f"{difference} Return what it must remember from forge_state_dict, and take it in forge_load_state_dict."
    )


class _Saver(Plugin):
    """Saves once: the kit knows no other plugin."""

    observer = True
    FOLDER = "saved-by-the-kit"

    def __init__(self) -> None:
        super().__init__()
        self.name = "forge.testing.saver"

    @hookimpl
    def forge_boundary(self, trainer: Trainer) -> None:
        if trainer.progress.update == CUT:
            trainer.request_checkpoint("to be resumed from")

    @hookimpl
    def forge_save(self, trainer: Trainer, capture: dict[str, Any]) -> None:
        if trainer.progress.update == CUT:
            assert trainer.run_dir is not None
            write_checkpoint(Checkpoints(trainer.run_dir / self.FOLDER).path(CUT), capture)


class _StateProbe(Plugin):
    """Innermost in the stack: hands a state to `plugin` at the start and takes its state at the end of every update."""

    observer = True

    def __init__(self, plugin: Plugin, given: dict[str, Any] | None = None):
        super().__init__()
        self.name, self.plugin, self.given = "forge.testing.state", plugin, given
        self.state: dict[str, Any] | None = None
        self.taken: dict[str, Any] | None = None

    @hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        if self.given is not None:
            dict(trainer.stack.implementations("forge_load_state_dict"))[self.plugin.name](trainer, self.given)
            self.taken = self._ask(trainer)

    @hookimpl
    def forge_boundary(self, trainer: Trainer) -> None:
        self.state = self._ask(trainer)

    def _ask(self, trainer: Trainer) -> dict[str, Any] | None:
        return copy.deepcopy(dict(trainer.stack.implementations("forge_state_dict"))[self.plugin.name](trainer))


def _check_plain(value: Any, path: str) -> None:
    """What a checkpoint can hold without pickle: None, numbers, strings, tensors, lists, and dicts with string keys."""
    if value is None or isinstance(value, (bool, int, float, str, Tensor)):
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            assert isinstance(key, str), f"{path} has the key {key!r}; keys must be strings."
            _check_plain(inner, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            _check_plain(inner, f"{path}[{i}]")
    else:
        raise AssertionError(
            f"{path} is a {type(value).__name__}; a state is made of None, numbers, strings, tensors, lists and dicts."
        )


def _state_difference(actual: Any, expected: Any, path: str) -> str:
    """The first place where two states differ, in words, or ""."""
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        difference = first_difference({path: actual}, {path: expected})
        return difference.removesuffix(".") if difference else ""
    if isinstance(actual, Mapping) and isinstance(expected, Mapping) and actual.keys() == expected.keys():
        found = (_state_difference(actual[key], expected[key], f"{path}[{key!r}]") for key in expected)
        return next(filter(None, found), "")
    if isinstance(actual, (list, tuple)) and isinstance(expected, (list, tuple)) and len(actual) == len(expected):
        pairs = enumerate(zip(actual, expected, strict=True))
        return next(filter(None, (_state_difference(a, b, f"{path}[{i}]") for i, (a, b) in pairs)), "")
    if type(actual) is type(expected) and not isinstance(actual, torch.Tensor) and actual == expected:
        return ""
    return f"{path} = {actual!r} instead of {expected!r}"
