"""Pictures come when they are due, are the model's own, and change nothing."""

from __future__ import annotations

import pytest
import torch
from forge_image_sampler import ImageSampler

import forge
from forge.testing import TinyGAN, assert_same, check_plugin

FLAT = {"latent": 6, "shape": [1, 1, -1]}


class Seen(forge.Plugin):
    """Keep what is logged as `samples`."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures: dict[int, torch.Tensor] = {}

    @forge.hookimpl
    def forge_log(self, update, metrics) -> None:
        if "samples" in metrics:
            self.pictures[update] = torch.as_tensor(metrics["samples"].data)


def test_it_keeps_the_contract() -> None:
    check_plugin(lambda: ImageSampler(**FLAT, count=4))


def test_a_picture_is_logged_when_it_is_due(forge_run) -> None:
    seen = Seen()
    forge_run([seen, ImageSampler(**FLAT, every="2 updates")], max_updates=5)
    assert sorted(seen.pictures) == [2, 4]


def test_the_same_noise_shows_how_the_model_changes(forge_run) -> None:
    first, second, other = Seen(), Seen(), Seen()
    forge_run([first, ImageSampler(**FLAT, every="2 updates", normalize=True)], max_updates=4)
    forge_run([second, ImageSampler(**FLAT, every="2 updates", normalize=True)], max_updates=4)
    forge_run([other, ImageSampler(**FLAT, every="2 updates", normalize=True, seed=1)], max_updates=4)
    assert torch.equal(first.pictures[4], second.pictures[4])
    assert not torch.equal(first.pictures[2], first.pictures[4])
    assert not torch.equal(first.pictures[4], other.pictures[4])


def test_a_part_of_the_task_makes_the_images(forge_run) -> None:
    seen = Seen()
    sampler = ImageSampler(part="generator", latent=4, shape=[1, 2, 3], every="1 update")
    task = forge_run([seen, sampler], task=TinyGAN(), max_updates=1).task
    assert_same(task, forge_run([], task=TinyGAN(), max_updates=1).task)
    assert list(seen.pictures) == [1]


@pytest.mark.parametrize("options", [{"latent": 0}, {"latent": 4, "count": 0}, {"latent": 4, "columns": 0}])
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ImageSampler(**options)
