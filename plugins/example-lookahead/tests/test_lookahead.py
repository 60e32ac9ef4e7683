"""Lookahead does what the paper says, and keeps forge's contract."""

from __future__ import annotations

import pytest
import torch
from forge_lookahead import Lookahead

import forge
from forge.testing import TinyTask, assert_same_weights, check_plugin, fit_tiny


def test_it_keeps_the_contract() -> None:
    check_plugin(lambda: Lookahead(every=2))


def test_alpha_one_leaves_the_run_as_it_is() -> None:
    assert_same_weights(fit_tiny([Lookahead(every=2, alpha=1.0)])[0], fit_tiny()[0])


def test_alpha_zero_stays_where_it_began() -> None:
    task, _ = fit_tiny([Lookahead(every=2, alpha=0.0)], max_updates=4)
    assert_same_weights(dict(task.named_parameters()), dict(TinyTask().named_parameters()))


def test_slow_weights_go_half_of_the_way() -> None:
    begin, (there, _) = TinyTask(), fit_tiny(max_updates=3)
    met, result = fit_tiny([Lookahead(every=3, alpha=0.5)], max_updates=3)
    for (name, weight), a, b in zip(met.named_parameters(), begin.parameters(), there.parameters(), strict=True):
        assert torch.allclose(weight, (a + b) / 2, atol=1e-6), name
    assert result.metrics["lookahead/distance"] > 0


def test_a_skipped_update_does_not_count() -> None:
    class SkipFirst(forge.Plugin):
        @forge.hookimpl
        def forge_inspect_grads(self, step: forge.Step) -> None:
            if step.index == 0:
                step.skip_update("on purpose")

    lookahead = Lookahead(every=2)
    fit_tiny([SkipFirst(), lookahead], max_updates=4)
    assert lookahead.updates == 3


@pytest.mark.parametrize("options", [{"every": 0}, {"alpha": 1.5}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="it must"):
        Lookahead(**options)
