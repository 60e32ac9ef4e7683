"""monitor: when it looks, that it only observes, and numbers that arrive one update later."""

from __future__ import annotations

from typing import Any

import pytest

import forge
from forge.testing import TinyGAN, fit_tiny
from forge_plugins import Monitor
from tests.support.monitor_kit import Keep, Spy, hooks_on, made, quiet, watched
from tests.support.tasks import fit, make_batches

# ---------------------------------------------------------------------------------------------------------------------
# When


def test_it_looks_when_its_interval_ends() -> None:
    assert watched(made(), make_batches(7), monitor=quiet("3 updates")).updates == [3, 6]
    assert watched(made(), make_batches(4), monitor=quiet("1 epoch"), max_epochs=2).updates == [4, 8]


@pytest.mark.parametrize(("batches", "expected"), [(7, [*range(1, 8)]), (60, [*range(3, 61, 3)])])
def test_by_itself_it_looks_twenty_times(batches: int, expected: list[int]) -> None:
    assert watched(made(), make_batches(batches), monitor=Monitor(shapes=False)).updates == expected


@pytest.mark.parametrize(
    ("off", "gone"),
    [
        ("weights", ("weight_norm", "update_ratio", "histogram/weight")),
        ("activations", ("activation", "histogram/activation")),
    ],
)
def test_what_is_switched_off_is_not_looked_at(off: str, gone: tuple[str, ...]) -> None:
    everything = watched(made(), make_batches(1), monitor=quiet(histograms=True)).of(1)
    less: dict[str, Any] = {off: False}
    found = watched(made(), make_batches(1), monitor=quiet(histograms=True, **less)).of(1)
    assert found.keys() == {name for name in everything if not name.startswith(gone)}
    assert len(found) < len(everything)


def test_hooks_stand_only_while_an_update_is_looked_at() -> None:
    task = Spy()
    watched(task, make_batches(6), monitor=quiet("3 updates"))
    assert task.seen == [0, 0, 3, 0, 0, 3]
    assert hooks_on(task) == 0


def test_it_says_when_it_is_due() -> None:
    due: list[tuple[bool, bool]] = []
    bare, tabular = quiet("2 updates"), Monitor("2 updates")
    tabular.name = "tabular"

    @forge.on("step_end")
    def ask(step: forge.Step) -> None:
        due.append((bare.due(step), tabular.due(step)))

    fit(made(), make_batches(4), plugins=[ask, bare, tabular])
    assert due == [(False, True), (True, True), (False, False), (True, True)]


def test_with_several_optimizers_each_has_its_own_names() -> None:
    keep = Keep()
    fit_tiny([quiet("2 updates"), keep], task=TinyGAN())
    found = keep.of(2)
    assert {"generator/grad_norm", "discriminator/grad_norm"} <= found.keys()
    assert "generator/grad_norm/generator.0.weight" in found
    assert "generator/grad_norm/discriminator.0.weight" not in found
    assert "discriminator/update_ratio/discriminator.0.weight" in found
    assert {f"{name}/activation/discriminator.1/mean" for name in ("generator", "discriminator")} <= found.keys()


# ---------------------------------------------------------------------------------------------------------------------
# It is an observer
