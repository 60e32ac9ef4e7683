"""check_plugin: test a plugin against the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from forge import options
from forge.contract.plugin import Plugin
from forge.contract.stack import check_hooks
from forge.errors import StackError
from forge.testing.capturable import check_capturable
from forge.testing.exceptions import check_exceptions
from forge.testing.files import check_files
from forge.testing.leaks import check_graphs, check_leaks
from forge.testing.order import check_order
from forge.testing.purity import check_purity
from forge.testing.resume import check_runs
from forge.testing.subject import SITUATIONS, Given, Subject, subject

CHECKS: dict[str, Callable[[Subject], None]] = {
    "leaks": check_leaks,
    "runs": check_runs,
    "purity": check_purity,
    "files": check_files,
    "graphs": check_graphs,
    "exceptions": check_exceptions,
    "capturable": check_capturable,
    "order": check_order,
}
"""The checks in order: the first failure is the most informative."""


def check_plugin(
    plugin: Given,
    *,
    beside: Callable[[], Iterable[Plugin]] = tuple,
    leave_out: Iterable[str] = (),
) -> tuple[str, ...]:
    """Raise AssertionError unless the plugin keeps the contract; return the checks that were run. A whole test::

        def test_it_keeps_the_contract():
            check_plugin(lambda: MyPlugin(every="2 updates"))

    `plugin` is a class, a function that makes a plugin, or a plugin, which is copied. Give it options
    with which it acts within seven updates: code that never runs cannot be checked. Checked are

    - the class: a docstring, a description under every option, hooks that forge knows and can call;
    - leaks: after a run no hooks on the task, threads, open files or tensors remain, and torch's flags are restored;
    - runs, with one and two optimizers, with and without accumulation: nothing raises; with `observer = True` weights,
      counters, random numbers, the modes of modules and all other metrics are the same without the plugin, bit for bit;
      one object can serve two runs in a row; a resumed fit has the weights of an uninterrupted one, and the plugin the
      state; an observer logs the same in it (what differs from fit to fit, such as times, is never compared);
    - purity: with `observer = True` the user's code (methods, hooks, data, generators, files, environment) sees what it
      sees without the plugin, but for what `effects` declares;
    - files are written below the run folder, on the main rank alone; validation and prediction work without one;
    - graphs: no loss is kept with its autograd graph;
    - exceptions: an error of the task or of another plugin leaves the fit unchanged, everything is restored, and the
      object can serve the next fit;
    - `capturable = True`: no hook inside an update reads a value of the device;
    - order: the position beside forge's own plugins makes no difference, unless `before` or `after` define it.

    `beside` makes the other plugins that this one `requires`. `leave_out` names situations that the plugin refuses on
    purpose, such as "a fit with two optimizers" (with a message of its own), or checks ("order").
    """
    left = set(leave_out)
    unknown = left - {*CHECKS, *(situation.name for situation in SITUATIONS)}
    assert not unknown, (
        f"leave_out names {', '.join(sorted(unknown))}; known are {', '.join(CHECKS)}, and the situations "
        f"{', '.join(repr(situation.name) for situation in SITUATIONS)}."
    )
    checked = subject(plugin, beside, left)
    one = checked.make()
    check_class(one)
    checks = {name: check for name, check in CHECKS.items() if name not in left}
    if one.capturable is not True:
        checks.pop("capturable", None)
    if not one.observer:
        checks.pop("purity", None)
    for check in checks.values():
        check(checked)
    return tuple(checks)


def check_class(plugin: Plugin) -> None:
    """Check the plugin's documentation and the form of its hooks, without running it."""
    kind = type(plugin)
    try:
        check_hooks(plugin, f"plugin {plugin.name!r}")
    except StackError as error:
        raise AssertionError(str(error)) from error
    assert (kind.__doc__ or "").strip(), (
        f"{kind.__name__} has no docstring: describe it under `class`, for `forge plugins {plugin.name}`."
    )
    gives, takes = (getattr(plugin, hook, None) is not None for hook in ("forge_state_dict", "forge_load_state_dict"))
    assert gives == takes, (
        f"{plugin.name!r} defines only {'forge_state_dict' if gives else 'forge_load_state_dict'}: saved state must "
        "be restored, and the reverse. Define both."
    )
    bare = [option.name for option in options.of_config(kind.Config) if not option.doc]
    assert not bare, (
        f"{kind.__name__}.Config does not describe {', '.join(bare)}: write a string under each field, for "
        f"`forge plugins {plugin.name}`."
    )
