"""sleap-nn."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package(
    "sleap-nn==0.3.5",
    needs=("sleap-io", "skia-python", "loguru", "hydra-core", "scikit-image", "seaborn", "jsonpickle", "simplejson"),
    alone=True,
)


def sleap_nn_single() -> Any:
    """SingleInstanceLightningModule with a small UNet."""
    import torch
    from omegaconf import OmegaConf
    from sleap_nn.training.lightning_modules import SingleInstanceLightningModule

    unet = {
        **{"in_channels": 1, "kernel_size": 3, "filters": 4, "filters_rate": 1.5, "max_stride": 4, "stem_stride": None},
        **{"middle_block": True, "up_interpolate": True, "stacks": 1, "convs_per_block": 2, "output_stride": 2},
    }
    maps = {"part_names": ["a", "b"], "sigma": 1.5, "output_stride": 2}
    heads = OmegaConf.create({"single_instance": {"confmaps": maps}})
    module = SingleInstanceLightningModule("single_instance", "unet", OmegaConf.create({"unet": unet}), heads)

    def made(count: int, seed: int) -> Any:
        image = (numbers(count, 1, 1, 16, 16, seed=seed).sigmoid() * 255).to(torch.uint8)
        return loader(image=image, confidence_maps=numbers(count, 1, 2, 8, 8, seed=seed + 1).sigmoid())

    return module, made(16, 0), made(8, 5)
