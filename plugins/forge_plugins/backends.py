"""Switches of torch's backends."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.backends import cudnn
from torch.nn.attention import SDPBackend, sdpa_kernel

import forge
from forge.errors import RecipeError

logger = logging.getLogger("forge")

FIRST = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Backends(forge.Plugin):
    """Set switches of torch's CUDA backends for this run, and restore them at its end.

    `tf32` computes float32 matrix products and convolutions in TF32: 10 bits of mantissa instead of 23, several times
    as fast. `cudnn_benchmark` has cuDNN measure its convolutions for each shape, and use the fastest; another run may
    choose others, so bits may differ. `attention` names the backend that `scaled_dot_product_attention` tries first;
    calls that it does not support use the others.

    When to use it: `tf32` on any recent GPU without `amp`; the others where `forge tune speed` says that they pay. On
    other devices the plugin changes nothing.

    ::

        forge fit quickstart -p backends backends.tf32=true
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        tf32: bool = False
        "Compute float32 matrix products and convolutions in TF32."
        cudnn_benchmark: bool = False
        "Have cuDNN measure its convolutions; needs batches of one shape."
        attention: Literal["flash", "cudnn", "efficient"] | None = None
        "The backend that attention tries first; null: torch's own order."

    config: Config
    provides = ("backends",)
    capturable = True

    def __init__(self, *first: bool, **values: Any):
        super().__init__(*first, **values)
        self._switches = ExitStack()

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        if self.config.cudnn_benchmark and trainer.deterministic:
            raise RecipeError(
                "backends.cudnn_benchmark chooses algorithms by time, and trainer.deterministic=true allows only "
                "deterministic ones. Remove one of them."
            )

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, phase: str) -> None:
        if phase != "surgery":
            return
        self._switches.close()
        if trainer.env.device.type != "cuda":
            logger.info("backends: the switches are CUDA's, and this run is on %s.", trainer.env.device.type)
            return
        config, switches = self.config, self._switches
        if config.tf32:
            switches.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            switches.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
            torch.set_float32_matmul_precision("high")
            cudnn.allow_tf32, trainer.env.computes_in[self.name] = True, "tf32"
        if config.cudnn_benchmark:
            switches.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
            cudnn.benchmark = True
        if config.attention is not None:
            first = FIRST[config.attention]
            others = [backend for backend in (*FIRST.values(), SDPBackend.MATH) if backend is not first]
            switches.enter_context(sdpa_kernel([first, *others], set_priority=True))

    @forge.hookimpl
    def forge_end(self) -> None:
        self._switches.close()
