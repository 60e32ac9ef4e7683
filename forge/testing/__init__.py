"""What the tests of plugins need: small runs that take milliseconds, and one check of everything the contract promises.

::

    from forge.testing import check_plugin

    def test_it_keeps_the_contract():
        check_plugin(lambda: MyPlugin(every="2 updates"))

`check_plugin` trains tiny tasks with the plugin in every situation that a stack can put it in, and raises an
AssertionError that says what it did wrong. Tests of what the plugin is *for* are a few lines more::

    from forge.testing import assert_same_weights, fit_tiny

    def test_a_rate_of_zero_changes_nothing():
        plain, _ = fit_tiny([])
        task, result = fit_tiny([MyPlugin(rate=0.0)], max_epochs=2)
        assert_same_weights(task, plain)

The tests of kernels have theirs in :mod:`forge.testing.kernels`; its names are here too, and load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forge.testing.conformance import check_plugin
from forge.testing.tiny import TinyGAN, TinyTask, fit_tiny, tiny_batches
from forge.testing.weights import assert_same_weights, first_difference

if TYPE_CHECKING:
    from forge.testing.kernels import check_against_reference, check_compiles_whole, mend_interpreter, poisoned_memory

__all__ = [
    "TinyGAN",
    "TinyTask",
    "assert_same_weights",
    "check_against_reference",
    "check_compiles_whole",
    "check_plugin",
    "first_difference",
    "fit_tiny",
    "mend_interpreter",
    "poisoned_memory",
    "tiny_batches",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'forge.testing' has no attribute {name!r}")
    return getattr(import_module("forge.testing.kernels"), name)
