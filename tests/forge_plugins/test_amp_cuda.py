"""amp on a CUDA device: the bits of a hand-written loop; bf16 waits for nothing, fp16 once per update."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import forge
from forge.testing import TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import AMP, Accumulate, Clip
from tests.forge_plugins.test_amp import WithSchedule, train_by_hand
from tests.support.amp_kit import made, trained

pytestmark = pytest.mark.gpu


class Fused(TinyTask):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def pinned(count: int) -> list[Any]:
    return [(x.pin_memory(), y.pin_memory()) for x, y in tiny_batches([8] * count)]


@pytest.fixture(autouse=True)
def syncs_are_allowed_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


# -- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [TinyTask, WithSchedule, Fused])
@pytest.mark.parametrize(("window", "clip"), [(1, None), (2, 0.3)])
def test_training_equals_a_hand_written_loop_bit_for_bit(
    dtype: str, kind: type[TinyTask], window: int, clip: float | None
) -> None:
    ours, theirs = kind(), kind()
    others = [Accumulate(window), *([] if clip is None else [Clip(clip)])]
    scales = trained(ours, made(dtype), *others, device="cuda", max_epochs=3)
    by_hand = train_by_hand(theirs, dtype, tiny_batches(), 3, "cuda", window=window, clip_norm=clip)
    assert scales == by_hand
    assert_same(ours, theirs)
    if dtype == "fp16":
        assert scales[0] == 2.0**19  # it did overflow


# -- host syncs -------------------------------------------------------------------------------------------------------


def syncs_per_update(*plugins: forge.Plugin, task: Any, log_every: int = 1000) -> list[int]:
    """How often the host waited in each update but the first, whose batch is looked at."""
    counted: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        @forge.on("step_end")
        def count(step: forge.Step) -> None:
            counted.append(sum("synchronizing CUDA operation" in str(warning.message) for warning in caught))
            torch.cuda.set_sync_debug_mode("warn")

        options: dict[str, Any] = {"max_updates": 8, "device": "cuda", "validate_every": None}
        fit_tiny([*plugins, count], task=task, train=pinned(40), log_every=log_every, **options)
    return [after - before for before, after in itertools.pairwise(counted)]


@pytest.mark.parametrize("kind", [Fused, TinyTask])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("log_every", [2, 1000])
def test_fp16_reads_the_device_exactly_once_per_update(kind: Any, window: int, log_every: int) -> None:
    plugins = [AMP("fp16", init_scale=128.0), Clip(0.1), Accumulate(window)]
    assert syncs_per_update(*plugins, task=kind(), log_every=log_every) == [1] * 7


def test_auto_takes_what_the_device_has(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fit_tiny([AMP()], task=Fused(), device="cuda")
    has = torch.cuda.is_bf16_supported(including_emulation=False)
    assert f"run in {'bf16' if has else 'fp16'} (auto) (autocast on cuda:0)" in caplog.text
