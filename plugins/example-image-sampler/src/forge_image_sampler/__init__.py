"""Pictures of a generative model: lightning-bolts' TensorboardGenerativeModelImageSampler as a forge plugin."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import forge
from forge.metrics.drawing import grid

__all__ = ["ImageSampler"]


class ImageSampler(forge.Plugin):
    """Log images that a generative model makes from noise, as `samples`.

    The task, or the part of it that `part` names, is called with `count` vectors of `latent` normal numbers, in
    evaluation mode. They are the same vectors each time, so that pictures of one run can be compared.

    ::

        forge fit gan_digits -p image_sampler image_sampler.part=generator image_sampler.latent=32
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        latent: int
        "Numbers in each vector of noise."
        shape: list[int] | None = None
        "Channels, height and width of an image, where the model returns flat vectors."
        part: str = ""
        "The submodule that makes images, such as `generator`; by default the task itself."
        count: int = 16
        "Number of images."
        columns: int = 8
        "Images in a row."
        normalize: bool = False
        "Scale all images together to the range from 0 to 1; without it values outside are cut off."
        every: str = "1 epoch"
        "How often: updates, epochs, samples or a time, as in '500 updates'."
        seed: int = 0
        "Seed of the noise."

        def __post_init__(self) -> None:
            for name in ("latent", "count", "columns"):
                if getattr(self, name) < 1:
                    raise ValueError(f"image_sampler.{name} is {getattr(self, name)}; it must be at least 1.")

    config: Config
    observer = True
    effects = ("evaluates",)  # hooks that the user put on the model see its calls
    example = {"latent": 6, "shape": [1, 1, -1], "count": 4}

    def __init__(self, *first: Any, **values: Any):
        super().__init__(*first, **values)
        self.every = forge.Interval(self.config.every)

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run, step: forge.Step) -> None:
        if self.every.due(step):
            trainer.publish({"samples": grid(self._images(trainer), columns=self.config.columns)})

    @torch.no_grad()
    def _images(self, trainer: forge.Run) -> torch.Tensor:
        config = self.config
        # a copy, so that the modes, statistics and generators of the run stay as they are
        model: nn.Module = copy.deepcopy(trainer.task.get_submodule(config.part)).eval()
        # drawn on the CPU, by a generator of its own: the same noise on every device, and none taken from the run
        noise = torch.randn(config.count, config.latent, generator=torch.Generator().manual_seed(config.seed))
        images = model(noise.to(trainer.env.device)).float()
        if config.shape is not None:
            images = images.reshape(config.count, *config.shape)
        if config.normalize:
            low, high = images.aminmax()
            images = (images - low) / (high - low).clamp_min(1e-5)
        return images.clamp(0, 1).cpu()
