"""Tiny Shakespeare, character by character: a small GPT as in nanoGPT's `train_shakespeare_char`, which generates text.

The text is 1,115,394 characters of plays, collected by Andrej Karpathy for char-rnn (public domain); the first nine
tenths are for training. Model and settings are nanoGPT's (https://github.com/karpathy/nanoGPT, MIT licence).
"""

from __future__ import annotations

import math
import secrets
import urllib.request
from collections.abc import Generator
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge.data import Splits, TokenStream
from forge_recipes.roots import data_root

Batch = tuple[Tensor, Tensor]

SOURCE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""The characters of the text, sorted; a token is an index into it."""


def encode(text: str) -> list[int]:
    """Return the tokens of a text."""
    unknown = sorted(set(text) - set(ALPHABET))
    if unknown:
        raise forge.DataError(
            f"shakespeare: {unknown[0]!r} does not occur in tiny Shakespeare; its characters are {ALPHABET!r}."
        )
    places = {character: place for place, character in enumerate(ALPHABET)}
    return [places[character] for character in text]


def decode(tokens: list[int]) -> str:
    """Return the text of tokens."""
    return "".join(ALPHABET[token] for token in tokens)


class CharAttention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class CharExperts(nn.Module):
    """MLPs of which each token has chosen some: the sum of their outputs, by weight."""

    def __init__(self, width: int, experts: int):
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, 4 * width, width))
        self.down = nn.Parameter(torch.empty(experts, width, 4 * width))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            rows, place = torch.where(chosen == expert)
            made = F.linear(F.gelu(F.linear(tokens[rows], self.up[expert])), self.down[expert])
            output = output.index_add(0, rows, (made * weights[rows, place, None]).to(output.dtype))
        return output


class CharMixture(nn.Module):
    """Experts, of which each position chooses two."""

    def __init__(self, width: int, experts: int):
        super().__init__()
        self.gate, self.experts = nn.Linear(width, experts, bias=False), CharExperts(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).topk(2)
        return self.experts(tokens, chosen, weights.softmax(-1)).view_as(x)


class CharBlock(nn.Module):
    """Attention and MLP, or a mixture of some, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float, experts: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention, self.dropout = CharAttention(width, heads, dropout), nn.Dropout(dropout)
        if experts:
            self.mlp = CharMixture(width, experts)
            return
        up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class CharGPT(forge.TaskModule):
    """A GPT over characters, as nanoGPT's without biases; at the end of a run it generates `sample` characters.

    With `experts`, each block has that many MLPs, of which a position chooses two.
    """

    def __init__(
        self,
        layers: int = 6,
        width: int = 384,
        heads: int = 6,
        context: int = 256,
        dropout: float = 0.2,
        lr: float = 1e-3,
        beta2: float = 0.99,
        weight_decay: float = 0.1,
        sample: int = 500,
        experts: int = 0,
    ):
        super().__init__()
        self.context, self.sample = context, sample
        self.lr, self.beta2, self.weight_decay = lr, beta2, weight_decay
        self.tokens, self.positions = nn.Embedding(len(ALPHABET), width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(CharBlock(width, heads, dropout, experts) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:  # scaled by the number of residual additions
                is_added = name.endswith(("attention.out.weight", "mlp.2.weight", "experts.down"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if is_added else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next character at each position; the head is tied to the embedding."""
        x = self.tokens(tokens) + self.positions(forge.positions(tokens))
        return F.linear(self.norm(self.blocks(self.dropout(x))), self.tokens.weight)

    def training_step(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with weight decay for matrices and embeddings, but not for norms."""
        decaying = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decaying, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, self.beta2), fused=self.positions.weight.is_cuda)

    @torch.inference_mode()
    def write(self, prompt: str = "\n", length: int = 500, temperature: float = 0.8, seed: int = 1337) -> str:
        """Return `prompt` continued by `length` characters, with a generator of its own, not the run's."""
        device = self.positions.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.tensor([encode(prompt)], device=device)
        for _ in range(length):
            logits = self(tokens[:, -self.context :])[:, -1] / temperature
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn], 1)
        return decode(tokens[0].tolist())

    @forge.hookimpl(wrapper=True)
    def forge_export(self, trainer: forge.Trainer) -> Generator[None, Any, Any]:
        """At the end of a fit, with its final weights: generate a text for the terminal and TensorBoard."""
        if self.sample:
            modes = [(module, module.training) for module in self.modules()]  # a part may be in evaluation mode
            try:
                text = self.eval().write(length=self.sample)
            finally:
                for module, mode in modes:
                    module.training = mode
            trainer.publish({"sample": forge.Text(f"```text\n{text.strip()}\n```")})
            if trainer.env.is_main:
                print(text.strip())
        return (yield)


def shakespeare(
    root: str | None = None,
    window: int = 256,
    batch_size: int = 64,
    order: Literal["random", "shuffled"] = "random",
    samples: int | None = None,
) -> Splits:
    """Load tiny Shakespeare as characters: windows of the first 90 % for training, and the rest, in order, to validate.

    The text is `tinyshakespeare/input.txt` in `root`, or in the folder FORGE_DATA; else it is downloaded to the user's
    cache. With `order` random, windows start anywhere, as in nanoGPT, and an epoch is `samples` of them (default: as
    many as fit into the text); shuffled, an epoch is the whole text once, cut into windows. Validation is always the
    same: all windows of the last 10 % in order (nanoGPT draws some at random).
    """
    text = find_text(root).read_text(encoding="utf-8")
    tokens = np.array(encode(text), np.uint16)
    cut = int(0.9 * len(tokens))
    return Splits(
        train=TokenStream(tokens[:cut], window, batch_size, mode=order, samples=samples, drop_last=True),
        val=TokenStream(tokens[cut:], window, batch_size=128, mode="sequential"),
    )


def find_text(root: str | None) -> Path:
    """Return the path of the text; download it if missing."""
    path = data_root(root, "tinyshakespeare") / "input.txt"
    if path.is_file():
        return path
    part = path.with_suffix(f".{secrets.token_hex(4)}.part")  # unique, since other processes may download it too
    try:
        with urllib.request.urlopen(SOURCE, timeout=30) as answer:
            text = answer.read()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(text)
            part.replace(path)  # atomic
        finally:
            part.unlink(missing_ok=True)
    except (OSError, HTTPException) as error:
        if path.is_file():  # another process has downloaded it
            return path
        raise forge.DataError(
            f"shakespeare: {path} does not exist, and {SOURCE} cannot be downloaded ({error}). Save the text there, or "
            "set FORGE_DATA (or data.root) to a folder with tinyshakespeare/input.txt."
        ) from error
    return path
