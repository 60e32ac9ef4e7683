"""The memory format of images."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

import forge
from forge.contract.task import Build
from forge.env import map_items

logger = logging.getLogger("forge")


class ChannelsLast(forge.Plugin):
    """Keep images and convolution weights in the memory format `channels_last`.

    The shapes stay the same: only the order in memory changes, so the code of the task does not. Tensors of a batch
    with four dimensions, and weights with four dimensions, are converted. Files do not change, and at the end of a run
    the task is as it was.

    When to use it: for convolutional networks on a GPU in half precision, and on many CPUs. Kernels for this format add
    in another order, so the last bits differ. `forge tune speed` measures whether it pays.

    ::

        forge fit multilabel -p channels_last trainer.max_updates=3
    """

    provides = ("memory_format",)
    capturable = True

    def __init__(self) -> None:
        super().__init__()
        self._changed: list[nn.Parameter] = []

    @forge.hookimpl
    def forge_build_model(self, build: Build, phase: str) -> None:
        if phase != "surgery":
            return
        self._changed = [p for p in build.task.parameters() if p.ndim == 4 and not p.is_meta]
        for parameter in self._changed:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        if not self._changed:
            logger.info("channels_last: %s has no weight of four dimensions.", type(build.task).__name__)

    @forge.hookimpl(wrapper=True)
    def forge_prepare_batch(self) -> Generator[None, Any, Any]:
        return _converted((yield))

    @forge.hookimpl
    def forge_end(self) -> None:
        for parameter in self._changed:
            parameter.data = parameter.data.contiguous()
        self._changed = []


def _converted(value: Any) -> Any:
    """Return a batch with its tensors of four dimensions in the format."""
    if isinstance(value, Tensor):
        suits = value.ndim == 4 and value.is_floating_point()
        return value.contiguous(memory_format=torch.channels_last) if suits else value
    changed = map_items(value, _converted)
    return value if changed is None else changed
