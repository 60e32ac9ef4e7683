"""GPT-2, compact: pre-norm blocks, learned positions, a head tied to the embedding."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import forge
import forge_kernels as kernels

Batch = tuple[Tensor, Tensor]

FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Attention(nn.Module):
    """Causal self-attention; `kind` selects the implementation."""

    def __init__(self, width: int, heads: int, kind: str):
        super().__init__()
        self.heads, self.kind = heads, kind
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.kind == "forge":
            mixed = kernels.attention(q, k, v, causal=True)
        elif self.kind == "cudnn":
            with sdpa_kernel(FASTEST_FIRST, set_priority=True):
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and MLP, each added to its input; `mlp` is `plain` or `fused`."""

    def __init__(self, width: int, heads: int, attention: str, mlp: str):
        super().__init__()
        self.is_fused = mlp == "fused"
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, attention)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self._mlp(self.norm2(x))

    def _mlp(self, x: Tensor) -> Tensor:
        if not self.is_fused:
            return self.mlp(x)
        first: Any = self.mlp[0]
        second: Any = self.mlp[2]
        return kernels.mlp(x, first.weight, first.bias, second.weight, second.bias)


class GPT(forge.TaskModule):
    """A GPT-2 language model; the defaults are its smallest, of 124 million parameters.

    `attention` is `sdpa` (torch's choice), `cudnn` (torch's, with cuDNN's kernel first) or `forge` (forge.kernels).
    `loss` is `plain`, `fused` (forge.kernels.cross_entropy) or `chunked` (forge.kernels.linear_cross_entropy, which
    never stores all logits). `mlp` is `plain` or `fused` (forge.kernels.mlp). `residual` is the dtype of the residual
    stream: under autocast torch's is `float32`, and `bf16` moves half the bytes. The vocabulary is padded to a multiple
    of 128, which is faster on matrix units; no text contains the added tokens.
    """

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        context: int = 1024,
        vocabulary: int = 50257,
        attention: Literal["sdpa", "cudnn", "forge"] = "sdpa",
        loss: Literal["plain", "fused", "chunked"] = "plain",
        mlp: Literal["plain", "fused"] = "plain",
        residual: Literal["float32", "bf16"] = "float32",
        lr: float = 6e-4,
        weight_decay: float = 0.1,
    ):
        super().__init__()
        self.loss_kind, self.lr, self.weight_decay = loss, lr, weight_decay
        self.residual = torch.bfloat16 if residual == "bf16" else torch.float32
        padded = math.ceil(vocabulary / 128) * 128
        self.tokens, self.positions = nn.Embedding(padded, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, attention, mlp) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):  # scaled by the number of residual additions
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states."""
        x = self.tokens(tokens) + self.positions(forge.positions(tokens))
        if torch.is_autocast_enabled(x.device.type):  # else all is in the dtype of the weights
            x = x.to(self.residual)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def training_step(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        hidden = self(inputs)
        if self.loss_kind == "chunked":
            return kernels.linear_cross_entropy(hidden.flatten(0, 1), self.tokens.weight, targets.flatten())
        logits = F.linear(hidden, self.tokens.weight).flatten(0, 1)
        if self.loss_kind == "fused":
            return kernels.cross_entropy(logits, targets.flatten())
        return F.cross_entropy(logits, targets.flatten())

    def validation_step(self, batch: Batch) -> dict[str, Tensor]:
        inputs, targets = batch
        logits = F.linear(self(inputs), self.tokens.weight).flatten(0, 1)
        return {"loss": F.cross_entropy(logits, targets.flatten())}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with weight decay for matrices, but not for biases and norms."""
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=next(self.parameters()).is_cuda)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
