"""What a plugin's own tests need: small runs that take milliseconds, and one check of everything the contract promises.

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
"""

from __future__ import annotations

from forge.testing.conformance import check_plugin
from forge.testing.tiny import TinyGAN, TinyTask, fit_tiny, tiny_batches
from forge.testing.weights import assert_same_weights, first_difference

__all__ = [
    "TinyGAN",
    "TinyTask",
    "assert_same_weights",
    "check_plugin",
    "first_difference",
    "fit_tiny",
    "tiny_batches",
]
