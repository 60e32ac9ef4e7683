"""Fine-tuning: the backbone is torchvision's, rests until it is thawed from the top, and learns slower further down."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import forge
from forge_recipes.digits import digits
from forge_recipes.finetune import PARTS, Finetune

pytest.importorskip("torchvision")


def state_of(task: Finetune) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in task.state_dict().items()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """The parts in which anything changed, statistics too: `head`, `layer4`, ..."""
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    return {name.split(".")[1] if name.startswith("backbone.") else name.split(".")[0] for name in changed}


@pytest.mark.slow
def test_a_file_of_weights_makes_it_torchvisions_network(tmp_path: Path) -> None:
    from torchvision.models import resnet18

    peer = resnet18().eval()
    torch.save(peer.state_dict(), tmp_path / "resnet18.pth")
    task = Finetune(weights=str(tmp_path / "resnet18.pth")).eval()
    features: list[Tensor] = []
    peer.fc.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    images = torch.rand(3, 8, 8)
    peer(task.as_photographs(images))
    torch.testing.assert_close(task.backbone(task.as_photographs(images)), features[0])
    torch.testing.assert_close(task(images), task.head(features[0]))


@pytest.mark.slow
def test_without_a_network_weights_are_random_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("torch.hub.download_url_to_file", refuse)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="forge"):
        torch.manual_seed(1)
        unfetched = Finetune()
    assert len([r for r in caplog.records if "cannot be downloaded (no route to host)" in r.getMessage()]) == 1
    torch.manual_seed(1)
    for mine, its in zip(unfetched.parameters(), Finetune(weights=False).parameters(), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.slow
def test_the_recipe_trains_the_head_then_the_top_then_everything() -> None:
    freeze = ["freeze.thaw={backbone.layer4: 2 updates, backbone: 4 updates}"]
    recipe = forge.recipe("finetune", ["task.weights=false", "data.batch_size=4", "trainer.seed=1", *freeze])
    assert recipe.plugins.freeze.modules == "backbone"
    states: list[Any] = []

    @forge.on("step_end")
    def note(step: forge.Step) -> None:
        states.append(state_of(task))

    trainer = forge.Trainer(
        recipe=recipe, max_updates=6, run_dir=False, device="cpu", validate_every=None, plugins=[note]
    )
    task, _ = trainer.build()
    assert isinstance(task, Finetune)
    states.append(state_of(task))
    trainer.fit(task, digits(batch_size=4).train)
    seen = [moved(before, after) for before, after in pairwise(states)]
    assert seen[:2] == [{"head"}] * 2
    assert seen[2:4] == [{"head", "layer4"}] * 2
    assert seen[4:] == [{"head", *PARTS}] * 2
