"""The peak that a dry run predicts, against the one that CUDA's allocator saw."""

from __future__ import annotations

import pytest
import torch

from benchmarks.planned import BAR, SIZES, STACKS, compare
from forge.planning import run_dry

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("model", SIZES["full"])
def test_the_peak_is_within_ten_percent_of_the_measured_one(model: str, stack: str) -> None:
    row = compare(model, SIZES["full"][model], stack)
    assert row.measured is not None
    assert row.ratio is not None
    predicted, measured = row.predicted / 2**30, row.measured / 2**30
    print(f"{model}, {stack}: predicted {predicted:.3f} GiB, measured {measured:.3f} GiB, ratio {row.ratio:.3f}")
    assert abs(row.ratio - 1) <= BAR


def test_a_dry_run_allocates_nothing_on_the_device() -> None:
    torch.ones(1, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = SIZES["full"]["GPT-2 124M"]
    for stack in STACKS.values():
        run_dry(model.make, model.batch(), stack)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before
