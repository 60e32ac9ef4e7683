"""MosaicML's MPT as a task, for planning: the sizes of its 7B to 70B, on tokens without meaning.

Sizes: scripts/train/yamls/pretrain of mosaicml/llm-foundry. ALiBi is left out: it is a few numbers in attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge

WORDS = 50368


class MPTBlock(nn.Module):
    """Attention and a GELU, each behind a LayerNorm; no biases."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class MPT_7B(forge.TaskModule):
    """MPT with 7 billion parameters; its head is the embedding."""

    layers, width, heads = 32, 4096, 32

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, self.width)
        self.blocks = nn.ModuleList(MPTBlock(self.width, self.heads) for _ in range(self.layers))
        self.norm = nn.LayerNorm(self.width, bias=False)

    def training_step(self, batch: Any) -> Tensor:
        tokens, following = batch
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


class MPT_13B(MPT_7B):
    layers, width, heads = 40, 5120, 40


class MPT_30B(MPT_7B):
    layers, width, heads = 48, 7168, 56


class MPT_70B(MPT_7B):
    layers, width, heads = 80, 8192, 64
