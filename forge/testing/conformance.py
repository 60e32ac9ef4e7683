"""check_plugin: does a plugin keep what the contract promises to everybody else in the stack?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forge import options
from forge.contract.plugin import Plugin
from forge.contract.stack import check_hooks
from forge.errors import StackError
from forge.testing import cost
from forge.testing.capturable import check_capturable
from forge.testing.exceptions import check_exceptions
from forge.testing.files import check_files
from forge.testing.leaks import check_graphs, check_leaks
from forge.testing.order import check_order
from forge.testing.resume import check_runs, check_state
from forge.testing.subject import SITUATIONS, Given, Subject, subject

CHECKS: dict[str, Callable[[Subject], None]] = {
    "leaks": check_leaks,
    "state": check_state,
    "runs": check_runs,
    "files": check_files,
    "graphs": check_graphs,
    "exceptions": check_exceptions,
    "capturable": check_capturable,
    "order": check_order,
}
"""What is checked, in this order: the first that fails says the most."""


@dataclass(frozen=True, slots=True)
class PluginReport:
    """What check_plugin found out about a plugin that keeps the contract."""

    name: str
    checked: tuple[str, ...]
    "The checks that it went through."
    cost_us: float
    "Microseconds that it adds to an update of a tiny task on this machine; NaN where that was left out."
    update_us: float
    "Microseconds of such an update without it; NaN where that was left out."

    def __str__(self) -> str:
        said = f"{self.name} keeps the contract ({', '.join(self.checked)})"
        if math.isnan(self.cost_us):
            return f"{said}."
        return f"{said}; it adds {self.cost_us:.0f} µs to an update of {self.update_us:.0f} µs."


def check_plugin(
    plugin: Given,
    *,
    beside: Callable[[], Iterable[Plugin]] = tuple,
    leave_out: Iterable[str] = (),
    max_cost_us: float | None = None,
) -> PluginReport:
    """Raise AssertionError unless the plugin keeps the contract. One line is a whole test::

        def test_it_keeps_the_contract():
            check_plugin(lambda: MyPlugin(every="2 updates"))

    `plugin` is a class, a function that makes a plugin, or a plugin (then others are made from its options). Give it
    options with which it acts within seven updates: what never runs cannot be judged. Checked are

    - the class: a docstring, a description under every option, hooks that forge knows and can call;
    - leaks: hooks on the task, threads, open files, tensors, and switches of torch are as before once a run is over;
    - state: `forge_state_dict` returns plain data and tensors, and `forge_load_state_dict` takes them back;
    - runs, with one and with two optimizers, with and without accumulation: nothing raises; with `observer = True`
      weights, counters, random numbers, the modes of modules and everybody else's metrics are the same without the
      plugin, bit for bit; one object serves two runs in a row; a fit that was cut off and resumed ends in the weights
      of the straight one, and an observer logs the same in it (metrics that differ from fit to fit, such as times, are
      never compared);
    - files are written below the run folder, on the main rank alone; validation and prediction do without one;
    - graphs: no loss is kept together with what autograd made it from;
    - exceptions: an error of the task or of another plugin leaves the fit as it was raised, everything is put back,
      and the object serves the next fit;
    - `capturable = True`: no hook inside an update reads a value of the device;
    - order: the place beside forge's own plugins makes no difference, unless `before` or `after` say which is right;
    - the cost per update, which is measured and returned; it fails only above `max_cost_us`.

    `beside` makes the other plugins that this one `requires`. `leave_out` names situations that the plugin refuses on
    purpose, such as "a fit with two optimizers" (it should refuse them with a message of its own), or checks ("order",
    "cost").
    """
    left = set(leave_out)
    unknown = left - {*CHECKS, "cost", *(situation.name for situation in SITUATIONS)}
    assert not unknown, (
        f"leave_out names {', '.join(sorted(unknown))}; there are {', '.join([*CHECKS, 'cost'])}, and the situations "
        f"{', '.join(repr(situation.name) for situation in SITUATIONS)}."
    )
    looked_at = subject(plugin, beside, left)
    one = looked_at.make()
    check_class(one)
    checks = {name: check for name, check in CHECKS.items() if name not in left}
    if not one.capturable:
        checks.pop("capturable", None)
    for check in checks.values():
        check(looked_at)
    nothing = cost.PluginCost(float("nan"), float("nan"))
    spent = nothing if "cost" in left and max_cost_us is None else cost.measure(looked_at)
    assert max_cost_us is None or spent.own_us <= max_cost_us, (
        f"{looked_at.name!r} adds {spent.own_us:.0f} µs to an update of {spent.alone_us:.0f} µs; allowed are "
        f"{max_cost_us:g}."
    )
    return PluginReport(looked_at.name, tuple(checks), spent.own_us, spent.alone_us)


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
