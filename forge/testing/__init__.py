"""Test kit for plugins: tiny runs that take milliseconds, and one check of the whole plugin contract.

::

    from forge.testing import check_plugin

    def test_it_keeps_the_contract():
        check_plugin(lambda: MyPlugin(every="2 updates"))

`check_plugin` trains tiny tasks with the plugin in many situations, and raises an AssertionError that names the broken
rule and the fix. For tests of the plugin's own purpose, pytest has the fixtures `forge_run`, `tiny_task` and
`event_trace` wherever forge is installed::

    def test_the_norm_is_recorded_every_other_update(forge_run):
        run = forge_run([MyPlugin(every="2 updates")], max_updates=4)
        assert [update for update, _ in run.series("weight_norm")] == [2, 4]

    def test_a_rate_of_zero_changes_nothing(forge_run):
        assert_same_weights(forge_run([MyPlugin(rate=0.0)]).task, forge_run([]).task)

All names load on first use, so that pytest, which loads the fixtures at its start, does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.testing.conformance import PluginReport, check_plugin
    from forge.testing.events import EventTrace
    from forge.testing.loaders import check_loader
    from forge.testing.runs import TinyRun, run_tiny
    from forge.testing.tiny import TinyGAN, TinyTask, fit_tiny, tiny_batches
    from forge.testing.weights import assert_same_weights, first_difference

_HOME = {
    "EventTrace": "forge.testing.events",
    "PluginReport": "forge.testing.conformance",
    "TinyGAN": "forge.testing.tiny",
    "TinyRun": "forge.testing.runs",
    "TinyTask": "forge.testing.tiny",
    "assert_same_weights": "forge.testing.weights",
    "check_loader": "forge.testing.loaders",
    "check_plugin": "forge.testing.conformance",
    "first_difference": "forge.testing.weights",
    "fit_tiny": "forge.testing.tiny",
    "run_tiny": "forge.testing.runs",
    "tiny_batches": "forge.testing.tiny",
}

__all__ = [
    "EventTrace",
    "PluginReport",
    "TinyGAN",
    "TinyRun",
    "TinyTask",
    "assert_same_weights",
    "check_loader",
    "check_plugin",
    "first_difference",
    "fit_tiny",
    "run_tiny",
    "tiny_batches",
]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'forge.testing' has no attribute {name!r}")
    offered = name not in _HOME
    value = (
        import_module("forge.registry").public(f"testing.{name}")
        if offered
        else getattr(import_module(_HOME[name]), name)
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
