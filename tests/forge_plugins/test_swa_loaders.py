"""swa with loaders that cannot be read twice at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import IterableDataset

import forge
from forge.data import Loader
from forge.testing import assert_same_weights, first_difference, fit_tiny, tiny_batches
from forge_plugins import SWA
from tests.support.averages import (
    applied,
    parameters,
)

# -- loaders that cannot be read twice at once ------------------------------------------------------------------------


class Counting(IterableDataset[Any]):
    """A stream that knows its place."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 24:
            generator = torch.Generator().manual_seed(self.at)
            self.at += 1
            yield torch.randn(6, generator=generator), self.at % 3
        self.at = 0

    def __len__(self) -> int:
        return 24

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_a_stream_that_keeps_its_place_is_reread_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fit(plugins: list[Any], **options: Any) -> forge.TaskModule:
        return fit_tiny(plugins, train=Loader(Counting(), 8), max_epochs=2, **options)[0]

    plugin = SWA(0)
    assert_same_weights(fit([plugin], run_dir=tmp_path), fit([]))
    assert "keeps its position, which a second pass would move" in caplog.text
    assert plugin._estimated
    estimated, means = load_file(tmp_path / "weights.safetensors"), SWA(0, update_bn=False)
    other = applied(means, fit([means]))
    assert first_difference(estimated, other)
    assert_same_weights({n: estimated[n] for n in parameters(other)}, parameters(other))


class OwnShuffle:
    """A loader with a generator of its own: another order each time it is read."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Any]:
        batches = tiny_batches()
        return iter([batches[i] for i in torch.randperm(len(batches), generator=self.generator).tolist()])

    def __len__(self) -> int:
        return len(tiny_batches())


@pytest.mark.slow
@pytest.mark.parametrize("every", ["2 updates", "1 epoch"])
@pytest.mark.parametrize("allow_inexact", [True, False])
def test_a_loader_that_draws_its_order_is_reread_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: str, allow_inexact: bool
) -> None:
    def fit(plugins: list[Any], **options: Any) -> forge.TaskModule:
        options |= {"validate_every": every, "allow_inexact": allow_inexact}
        return fit_tiny(plugins, train=OwnShuffle(), max_epochs=3, **options)[0]

    plugin = SWA(0, every="2 updates")
    assert_same_weights(fit([plugin], run_dir=tmp_path), fit([]))
    assert caplog.text.count("this loader may give another order on each pass") == 1
    assert plugin._estimated


def test_a_loader_with_nothing_left_leaves_the_mean_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit_tiny([SWA(0, update_bn=2)], train=iter(tiny_batches()), max_epochs=1, run_dir=tmp_path)
    assert "not estimated again" in caplog.text
    assert (tmp_path / "weights.safetensors").exists()
