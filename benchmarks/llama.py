"""Llama 2 and 3 as tasks, for planning: the sizes of Meta's 7B to 405B, on tokens without meaning.

    forge plan benchmarks/llama.py:Llama3_8B --cluster h100x16 data.batch_size=256
    forge plan benchmarks/llama.py:Llama3_405B --cluster h100x64 data.batch_size=512

Sizes: Grattafiori et al., 2024, "The Llama 3 Herd of Models", table 3; Touvron et al., 2023, "Llama 2". A plan needs
shapes alone, so nothing of it is ever allocated.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import forge
from forge.data import Splits


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, and a gated MLP; each behind an RMSNorm."""

    def __init__(self, width: int, heads: int, key_heads: int, hidden: int):
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, key_heads * self.size, bias=False)
        self.v = nn.Linear(width, key_heads * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (layer(y).view(batch, length, -1, self.size).transpose(1, 2) for layer in (self.q, self.k, self.v))
        groups = q.shape[1] // k.shape[1]
        k, v = rotated(k, turns).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(rotated(q, turns), k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Turn pairs of channels by their position, in float32, as Llama does."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = turns
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2).to(x.dtype)


def recomputed(block: nn.Module, x: Tensor, turns: Tensor, products: tuple[int, ...]) -> Tensor:
    """Run a block that keeps attention and some matrix products only."""

    def contexts() -> Any:
        counts = {False: itertools.count(1), True: itertools.count(1)}

        def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kept = "scaled_dot_product" in str(operation)
            if operation == torch.ops.aten.mm.default:
                kept = next(counts[context.is_recompute]) in products
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return checkpoint(
        functools.partial(block), x, turns, use_reentrant=False, context_fn=contexts, preserve_rng_state=False
    )


class Llama3_8B(forge.TaskModule):
    """Llama 3 with 8 billion parameters; AdamW."""

    layers, width, heads, key_heads, hidden = 32, 4096, 32, 8, 14336
    words = 128256
    products: tuple[int, ...] | None = None
    "Which matrix products of a block are kept, from 1; the rest of the block is computed again. None: all of it."

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.words, self.width)
        shape = self.width, self.heads, self.key_heads, self.hidden
        self.blocks = nn.ModuleList(LlamaBlock(*shape) for _ in range(self.layers))
        self.norm, self.head = nn.RMSNorm(self.width, eps=1e-5), nn.Linear(self.width, self.words, bias=False)

    def training_step(self, batch: Any) -> Tensor:
        tokens, following = batch
        x, turns = self.embed(tokens), self.turns(tokens.shape[1], tokens.device)
        for block in self.blocks:
            x = block(x, turns) if self.products is None else recomputed(block, x, turns, self.products)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())

    def turns(self, length: int, device: torch.device) -> Tensor:
        half = self.width // self.heads // 2
        speeds = 500000.0 ** -(torch.arange(half, device=device) / half)
        angles = torch.outer(torch.arange(length, device=device).float(), speeds)
        return torch.stack((angles.cos(), angles.sin()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


class Llama3_8BSelective(Llama3_8B):
    """The 8B whose blocks keep attention and every second matrix product: torchtitan's selective rule `op`."""

    products = 1, 3, 5, 7


class Llama3_8BSelectiveCompiled(Llama3_8B):
    """The same when compiled: the seventh product is added to the block's output, and backward does not read it."""

    products = 1, 3, 5


class Llama3_70B(Llama3_8B):
    """Llama 3 with 70 billion parameters."""

    layers, width, heads, key_heads, hidden = 80, 8192, 64, 8, 28672


class Llama3_405B(Llama3_8B):
    """Llama 3 with 405 billion parameters."""

    layers, width, heads, key_heads, hidden = 126, 16384, 128, 8, 53248


class Llama2_7B(Llama3_8B):
    """Llama 2 with 7 billion parameters."""

    layers, width, heads, key_heads, hidden, words = 32, 4096, 32, 32, 11008, 32000


class Llama2_13B(Llama3_8B):
    """Llama 2 with 13 billion parameters."""

    layers, width, heads, key_heads, hidden, words = 40, 5120, 40, 40, 13824, 32000


class Llama2_70B(Llama3_8B):
    """Llama 2 with 70 billion parameters."""

    layers, width, heads, key_heads, hidden, words = 80, 8192, 64, 8, 28672, 32000


def data(batch_size: int = 64, length: int = 8192) -> Splits:
    """Return batches of one token each: they take no memory, whatever their shape."""
    token = torch.zeros((), dtype=torch.long).expand(batch_size, length)
    return Splits(train=[(token, token)])
