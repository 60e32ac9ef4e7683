"""Lookahead does what the paper says, and keeps forge's contract."""

from __future__ import annotations

import pytest
import torch
from forge_lookahead import Lookahead

import forge
from forge.testing import assert_same, check_plugin


def test_it_keeps_the_contract() -> None:
    check_plugin(lambda: Lookahead(every=2))


def test_alpha_one_leaves_the_run_as_it_is(forge_run) -> None:
    assert_same(forge_run([Lookahead(every=2, alpha=1.0)]).task, forge_run().task)


def test_alpha_zero_stays_where_it_began(forge_run, tiny_task) -> None:
    task = forge_run([Lookahead(every=2, alpha=0.0)], max_updates=4).task
    assert_same(dict(task.named_parameters()), dict(tiny_task().named_parameters()))


def test_slow_weights_go_half_of_the_way(forge_run, tiny_task) -> None:
    begin, there = tiny_task(), forge_run(max_updates=3).task
    met = forge_run([Lookahead(every=3, alpha=0.5)], max_updates=3)
    for (name, weight), a, b in zip(met.task.named_parameters(), begin.parameters(), there.parameters(), strict=True):
        assert torch.allclose(weight, (a + b) / 2, atol=1e-6), name
    ((update, distance),) = met.series("lookahead/distance")
    assert update == 3
    assert distance > 0


def test_a_skipped_update_does_not_count(forge_run) -> None:
    class SkipFirst(forge.Plugin):
        @forge.hookimpl
        def forge_inspect_grads(self, step: forge.Step) -> None:
            if step.index == 0:
                step.skip_update("on purpose")

    run = forge_run([SkipFirst(), Lookahead(every=2)], max_updates=6)
    assert [update for update, _ in run.series("lookahead/distance")] == [3, 5]


@pytest.mark.parametrize("options", [{"every": 0}, {"alpha": 1.5}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="it must"):
        Lookahead(**options)
