"""Patterns that kernels replace in the graphs of other people's models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_kernels import discovery
from forge_kernels.graph_rewriting import GraphRewriting
from tests.support.profiles import some

KERNELS = ("linear_cross_entropy", "mlp")
WIDTH, WIDER, CLASSES = 32, 64, 96


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def rewritten(model: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], GraphRewriting]:
    """A function with the kernels in the graphs that torch traces, which run eagerly."""
    rewriting = GraphRewriting([discovery.load(name) for name in KERNELS])

    def backend(module: Any, inputs: Any) -> Any:
        rewriting(module.graph)
        module.recompile()
        return module.forward

    return torch.compile(model, backend=backend), rewriting


def loss_and_gradients(
    model: nn.Module, call: Callable[..., Tensor], *inputs: Tensor, dtype: torch.dtype | None = None
) -> list[Tensor]:
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = call(*inputs)
    found = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return [loss.detach(), *(g for g in found if g is not None)]


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)) for a, b in pairs)


def check(model: nn.Module, *inputs: Tensor, dtype: torch.dtype | None = None, within: float = 1e-6) -> dict[str, int]:
    """Compare a model with and without kernels in its graphs; return what was replaced."""
    expected = loss_and_gradients(model, model, *inputs, dtype=dtype)
    call, rewriting = rewritten(model)
    assert distance(loss_and_gradients(model, call, *inputs, dtype=dtype), expected) <= within
    return rewriting.found


class Language(nn.Module):
    """A model that ends in a linear layer and a loss, written in one of the ways that people write it."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], bias: bool = False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=bias)
        self.loss = loss
        if not bias:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.embedding(x))), y)


def viewed(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1)


def padded(logits: Tensor, y: Tensor) -> Tensor:
    labels = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1), reduction="sum") / 7


def sliced(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, CLASSES), y[..., 1:].reshape(-1))


def flattened(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1)


def transposed(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), y)


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(CLASSES, (2, 8)), torch.randint(CLASSES, (2, 8))


@pytest.mark.parametrize(
    ("loss", "bias"),
    [
        (padded, False),
        pytest.param(transposed, True, marks=pytest.mark.slow),
        *(pytest.param(loss, False, marks=pytest.mark.slow) for loss in (viewed, sliced, flattened)),
    ],
)
def test_a_head_and_its_loss_are_found(loss: Callable[..., Tensor], bias: bool) -> None:
    assert check(Language(loss, bias), *tokens()) == {"linear_cross_entropy": 1}


def used_twice(logits: Tensor, y: Tensor) -> Tensor:
    return viewed(logits, y) + 0.01 * logits.square().mean()


def weighted(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), y.view(-1), weight=torch.arange(1.0, CLASSES + 1))


def mixed(logits: Tensor, y: Tensor) -> Tensor:
    """A view that mixes classes and positions: a mistake, but not the kernel's business."""
    return F.cross_entropy(logits.transpose(1, 2).reshape(-1, CLASSES), y.view(-1))


def half_of_the_classes(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., : CLASSES // 2].reshape(-1, CLASSES // 2), y.view(-1) % (CLASSES // 2))


@pytest.mark.parametrize("loss", some([used_twice, mixed, half_of_the_classes, weighted], quick=2))
def test_what_only_looks_like_a_head_stays(loss: Callable[..., Tensor]) -> None:
    assert check(Language(loss), *tokens()) == {}


class Block(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor], dropout: float = 0.0):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, WIDER), nn.Linear(WIDER, WIDTH), nn.Dropout(dropout)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.drop(self.down(self.drop(self.activation(self.up(x)))))).square().mean()


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


ACTIVATIONS = [
    gelu_new,
    F.relu,
    *(pytest.param(f, marks=pytest.mark.slow) for f in (F.gelu, nn.GELU("tanh"), nn.SiLU())),
]
HALF: dict[str, Any] = {"dtype": torch.float16, "within": 2e-3}


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=["written out", "relu", "gelu", "tanh", "silu"])
def test_two_linear_layers_are_found(activation: Callable[[Tensor], Tensor]) -> None:
    assert check(Block(activation), torch.randn(16, WIDTH), **HALF) == {"mlp": 1}


@pytest.mark.parametrize("make", [lambda: Block(F.gelu, 0.1), lambda: Block(torch.sigmoid)], ids=["dropout", "sigmoid"])
def test_what_only_looks_like_an_mlp_stays(make: Callable[[], nn.Module]) -> None:
    assert check(make(), torch.randn(16, WIDTH), **HALF) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "found"), [("gpt2", {"mlp": 2}), ("llama", {})])
def test_the_models_of_transformers_have_them(kind: str, found: dict[str, int]) -> None:
    transformers = pytest.importorskip("transformers")
    common: dict[str, Any] = {"vocab_size": CLASSES, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(n_positions=32, n_embd=WIDTH, n_layer=2, n_head=2, **drop, **common)
        inner = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": WIDTH, "intermediate_size": WIDER, "num_hidden_layers": 2, "num_attention_heads": 2}
        inner = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **common))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(input_ids=x, labels=x).loss

    x, _ = tokens()
    assert check(Whole(), x, **HALF) == found
    torch._dynamo.reset()
    exact = check(Whole(), x, within=1e-5)
    assert exact == ({"linear_cross_entropy": 1} if kind == "llama" else exact)
