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
        assert_same(forge_run([MyPlugin(rate=0.0)]).task, forge_run([]).task)

Whether two programs are the same, and where they part, is asked with `twin`, also in loops without a Trainer::

    record.watch(model, optimizer)   # in each of the two, which get a Record
    print(twin(one, other))          # at update 3, in the gradients (0.weight): by about 0.02 of its norm

All names load on first use, so that pytest, which loads the fixtures at its start, does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.testing.conformance import check_plugin
    from forge.testing.events import EventTrace
    from forge.testing.fit_record import RecordFit
    from forge.testing.loaders import check_loader
    from forge.testing.runs import TinyRun
    from forge.testing.tiny import TinyGAN, TinyTask, fit_tiny, tiny_batches
    from forge.twin.compare import Difference, assert_same, first_difference
    from forge.twin.record import Record
    from forge.twin.start import twin

_HOME = {
    "Difference": "forge.twin.compare",
    "EventTrace": "forge.testing.events",
    "Record": "forge.twin.record",
    "RecordFit": "forge.testing.fit_record",
    "TinyGAN": "forge.testing.tiny",
    "TinyRun": "forge.testing.runs",
    "TinyTask": "forge.testing.tiny",
    "assert_same": "forge.twin.compare",
    "check_loader": "forge.testing.loaders",
    "check_plugin": "forge.testing.conformance",
    "first_difference": "forge.twin.compare",
    "fit_tiny": "forge.testing.tiny",
    "tiny_batches": "forge.testing.tiny",
    "twin": "forge.twin.start",
}

__all__ = [
    "Difference",
    "EventTrace",
    "Record",
    "RecordFit",
    "TinyGAN",
    "TinyRun",
    "TinyTask",
    "assert_same",
    "check_loader",
    "check_plugin",
    "first_difference",
    "fit_tiny",
    "tiny_batches",
    "twin",
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
