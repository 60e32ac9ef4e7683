"""forge.features: the outputs of layers, as plain hooks and torchvision give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge_recipes.digits import DigitsMLP, digits


def network(inplace: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace), nn.Sequential(nn.Linear(3, 2), nn.Tanh()))


def test_outputs_are_those_of_plain_hooks() -> None:
    model, x, plain = network(), torch.randn(5, 4), {}
    handles = [
        module.register_forward_hook(lambda m, i, o, name=name: plain.update({name: o.detach()}))
        for name, module in model.named_modules()
        if name
    ]
    with forge.features(model, ["*"]) as seen:
        model(x)
    for handle in handles:
        handle.remove()
    assert list(seen) == ["0", "1", "2.0", "2.1", "2"]
    assert all(torch.equal(seen[name], plain[name]) for name in seen)
    assert not seen["0"].requires_grad


def test_a_trained_runs_features_are_torchvisions(tmp_path: Path) -> None:
    extraction: Any = pytest.importorskip("torchvision.models.feature_extraction")
    data = digits()
    trainer = forge.Trainer(max_updates=2, plugins=["checkpoint"], run_dir=tmp_path / "run", device="cpu", seed=0)
    trainer.fit(DigitsMLP(hidden=8), data.train)
    task = forge.load(tmp_path / "run", DigitsMLP)
    images = next(iter(data.val))[0]
    with torch.no_grad(), forge.features(task, ["net.5"]) as seen:
        task(images)
    by_name = extraction.create_feature_extractor(task.net, ["5"])(images)
    assert torch.equal(seen["net.5"], by_name["5"])


def test_hooks_are_removed_after_an_error_too() -> None:
    model = network()
    with pytest.raises(RuntimeError), forge.features(model, ["0", "2.*"]):
        model(torch.randn(5, 9))
    assert not any(module._forward_hooks for module in model.modules())


def test_an_output_changed_in_place_is_not_given() -> None:
    x = torch.randn(5, 4)
    model = network(inplace=True)
    with forge.features(model, ["0"]) as seen:
        model(x)
    with pytest.raises(forge.ForgeError, match="copy=True"):
        seen["0"]
    with forge.features(model, ["0"], copy=True) as seen:
        model(x)
    assert torch.equal(seen["0"], model[0](x))


def test_gradients_flow_where_asked() -> None:
    model = network()
    with forge.features(model, ["0"], detach=False) as seen:
        model(torch.randn(5, 4))
    seen["0"].sum().backward()
    assert model[0].weight.grad is not None


def test_mistakes_name_the_fix() -> None:
    model = network()
    with pytest.raises(forge.ForgeError, match=r"no layer '2\.7'"), forge.features(model, ["2.7"]):
        pass
    with pytest.raises(forge.ForgeError, match=r"list of layers: \['0'\]"), forge.features(model, "0"):
        pass
    with forge.features(model, ["0"]) as seen, pytest.raises(KeyError, match="has not run"):
        seen["0"]
