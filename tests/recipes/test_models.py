"""The models of the recipes against ones that somebody else wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import forge
from forge_recipes.gpt import GPT
from forge_recipes.resnet import ResNet18
from forge_recipes.synthetic import tokens
from tests.support import kernel_kit  # noqa: F401 - mends Triton's interpreter, in which kernels run here

SMALL: dict[str, Any] = {"layers": 2, "width": 32, "heads": 2, "context": 16, "vocabulary": 100}


def test_the_defaults_are_gpt2_with_124_million_parameters() -> None:
    with torch.device("meta"):
        task = GPT()
    padding = (50304 - 50257) * 768
    assert sum(p.numel() for p in task.parameters()) - padding == 124_439_808  # as published, its head tied


def test_gpt_computes_what_the_gpt2_of_transformers_computes() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=128, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    peer = transformers.GPT2LMHeadModel(config).eval()
    task = GPT(**{**SMALL, "vocabulary": 128}).eval()
    names = {"wte": "tokens", "wpe": "positions", "ln_f": "norm", "h.": "blocks.", "ln_1": "norm1", "ln_2": "norm2"}
    names |= {
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "mlp.c_fc": "mlp.0",
        "mlp.c_proj": "mlp.2",
    }
    own = dict(task.named_parameters())
    with torch.no_grad():
        for name, weight in peer.transformer.named_parameters():
            mine = name
            for theirs, ours in names.items():
                mine = mine.replace(theirs, ours)
            transposed = weight.ndim == 2 and mine.startswith("blocks")  # its Conv1D keeps (inputs, outputs)
            own.pop(mine).copy_(weight.T if transposed else weight)
    assert not own
    text = torch.randint(128, (3, 16))
    logits = F.linear(task(text), task.tokens.weight)
    torch.testing.assert_close(logits, peer(text).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_resnet18_is_torchvisions_behind_the_small_stem() -> None:
    torchvision = pytest.importorskip("torchvision")
    peer = torchvision.models.resnet18(num_classes=10)
    peer.conv1, peer.maxpool = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False), torch.nn.Identity()
    task = ResNet18()
    mine = dict(task.named_parameters())
    theirs = dict(peer.named_parameters())
    blocks = [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    names = {"stem.0": "conv1", "stem.1": "bn1", "head": "fc"}
    for index, block in enumerate(blocks):
        inner = {"conv1": "conv1", "conv2": "conv2", "norm1": "bn1", "norm2": "bn2", "around": "downsample"}
        names |= {f"blocks.{index}.{a}": f"{block}.{b}" for a, b in inner.items()}
    with torch.no_grad():
        for name, weight in mine.items():
            head = next(key for key in sorted(names, key=len, reverse=True) if name.startswith(key))
            weight.copy_(theirs.pop(names[head] + name[len(head) :]))
    assert not theirs
    x = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(task(x), peer(x), rtol=1e-4, atol=1e-4)


def test_tokens_come_from_a_file_where_one_is_given(tmp_path: Any) -> None:
    path = tmp_path / "train.bin"
    torch.arange(500, dtype=torch.int16).numpy().astype("<u2").tofile(path)
    splits = tokens(str(path), window=8, batch_size=4)
    assert splits.train is not None
    inputs, targets = next(iter(splits.train))
    assert torch.equal(inputs + 1, targets)
    with pytest.raises(forge.DataError, match=r"the file nowhere\.bin"):
        tokens("nowhere.bin")
