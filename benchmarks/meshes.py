"""Meshes and models of others: the largest difference to one process, and the bytes of each rank beside the formula.

    python -m benchmarks.scale --meshes --write    # and write the table into docs/distributed.md

Tiny models of transformers and torchvision train four updates in float64, on every mesh, over gloo, with accumulation,
clipping and AdamW. A dash stands where a model cannot be divided so: GPT-2 has no nn.Linear, a ViT has no tokens.

The formula: a parameter has 1/tensor of its bytes if the plan cuts it, 1/pipe on average if it is in a block, and of
its rows, rounded up, 1/shard, under fsdp 1/(shard × context). The optimizer has two numbers for each.
"""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from benchmarks.ranks import on_ranks
from forge.optim.sharded import local
from forge_cluster.context_parallel import ContextParallel
from forge_cluster.pipeline import Pipeline
from forge_plugins import FSDP, Accumulate, Clip, TensorParallel

MESHES: tuple[dict[str, int], ...] = (
    {"data": 2, "shard": 2, "tensor": 2},
    {"data": 2, "pipe": 2, "tensor": 2},
    {"shard": 2, "pipe": 2, "tensor": 2},
    {"data": 2, "shard": 2, "pipe": 2},
    {"data": 2, "shard": 2, "context": 2},
    {"shard": 2, "context": 2, "tensor": 2},
)
WORDS, LENGTH, WIDTH, HIDDEN, HEADS, LAYERS, CLASSES = 32, 8, 16, 32, 4, 4, 3
CUTS = {
    (nn.Linear, "column"): {"weight": 0, "bias": 0},
    (nn.Linear, "gather"): {"weight": 0, "bias": 0},
    (nn.Linear, "row"): {"weight": 1},
    (nn.Embedding, "gather"): {"weight": 1},
}
"""The dimension of each parameter of a layer that a style of tensor_parallel cuts."""

PAGE = Path(__file__).parents[1] / "docs" / "distributed.md"
BEGIN, END = "<!-- by python -m benchmarks.scale --meshes --write -->", "<!-- end of the table -->"

Plan = dict[str, Any]
Mesh = Mapping[str, int]


def bytes_per_rank(task: nn.Module, blocks: str, plan: Plan, mesh: Mesh) -> float:
    """Return the bytes of parameters that a mesh gives a rank, the fullest of those with the same stage."""
    layers = {name: (type(module), kind) for name, module in task.named_modules() for kind in _kinds(plan, name)}
    rows = mesh.get("shard", 1) * (1 if "pipe" in mesh else mesh.get("context", 1))
    total = 0.0
    for name, parameter in task.named_parameters():
        owner, _, last = name.rpartition(".")
        shape = list(parameter.shape)
        cut = CUTS.get(layers.get(owner, (nn.Module, "")), {}).get(last)
        if cut is not None:
            shape[cut] //= mesh.get("tensor", 1)
        if shape:
            shape[0] = -(-shape[0] // rows)
        total += math.prod(shape) * parameter.itemsize / (mesh.get("pipe", 1) if name.startswith(blocks) else 1)
    return total


def _kinds(plan: Plan, name: str) -> list[str]:
    return [kind for pattern, kind in plan.items() if fnmatch.fnmatchcase(name, pattern)][:1]


# -- models of others -------------------------------------------------------------------------------------------------


class OfOthers(forge.TaskModule):
    """A model that someone else wrote, around which the task is a few lines."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model.double()

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).flatten(0, -2), y.flatten())

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ReadsText(OfOthers):
    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, position_ids=forge.positions(x)[None], use_cache=False).logits


def llama() -> OfOthers:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_attention_heads": HEADS}
    heads: dict[str, Any] = {"num_key_value_heads": 2, "num_hidden_layers": LAYERS, "vocab_size": WORDS}
    return ReadsText(LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2)))


def gpt2() -> OfOthers:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {
        "n_positions": LENGTH,
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "vocab_size": WORDS,
    }
    drops: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return ReadsText(GPT2LMHeadModel(GPT2Config(**sizes, **drops, initializer_range=0.2)))


def vit() -> OfOthers:
    from torchvision.models import VisionTransformer

    model: Any = VisionTransformer(8, 4, LAYERS, HEADS, WIDTH, HIDDEN, num_classes=CLASSES)
    nn.init.normal_(model.heads.head.weight)  # torchvision begins with zeros, which no gradient passes
    return OfOthers(model)


def texts(draw: torch.Generator, size: int) -> Any:
    words = torch.randint(WORDS, (size, LENGTH + 1), generator=draw)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def pictures(draw: torch.Generator, size: int) -> Any:
    shown = torch.randn(size, 3, 8, 8, dtype=torch.float64, generator=draw)
    return shown, torch.randint(CLASSES, (size,), generator=draw)


@dataclass(frozen=True, slots=True)
class Model:
    """A model of others."""

    make: Callable[[], OfOthers]
    batch: Callable[[torch.Generator, int], Any]
    blocks: str
    "What the names of its blocks' parameters begin with."
    plan: Plan
    "What tensor_parallel divides."
    tokens: bool = True

    def takes(self, mesh: Mesh) -> bool:
        return ("tensor" not in mesh or bool(self.plan)) and ("context" not in mesh or self.tokens)


QKV = {"*.[qkv]_proj": "column", "*.o_proj": "row"}
MLP = {"*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row"}
MODELS = {
    "Llama (transformers)": Model(llama, texts, "model.model.layers.", {**QKV, **MLP}),
    "GPT-2 (transformers)": Model(gpt2, texts, "model.transformer.h.", {}),
    "ViT (torchvision)": Model(
        vit, pictures, "model.encoder.layers.", {"*.mlp.0": "column", "*.mlp.3": "row"}, tokens=False
    ),
}


# -- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeshRow:
    """One model on one mesh."""

    mesh: Mesh
    model: str
    difference: float
    "The largest difference of a weight to one process."
    megabytes: float
    "Bytes of parameters and optimizer state of the fullest rank, in units of 1e6."
    expected_megabytes: float


@dataclass(frozen=True, slots=True)
class MeshCost:
    """CPU time of an update on all ranks of a mesh, the quietest tenth of the turns."""

    mesh: Mesh
    by_hand_ms: float
    ratio: float
    "forge's over torch's own by hand."
    again_ratio: float
    "By hand again, over by hand: noise."
    difference: float
    "The largest of a weight, in float32."


def strategies(mesh: Mesh, parts: int, plan: Plan, balance: bool = True) -> list[Any]:
    """Return the plugins of a mesh."""
    found: list[Any] = [Pipeline(parts) if "pipe" in mesh else FSDP(min_size=0)]
    found += [ContextParallel(balance=balance)] if "context" in mesh else []
    return found + ([TensorParallel(plan=plan)] if "tensor" in mesh else [])


def fit(name: str, mesh: Mesh) -> tuple[dict[str, Tensor], int]:
    """Train on a mesh, or in one process; return the weights, and the bytes of parameters and optimizer state."""
    model = MODELS[name]
    torch.manual_seed(3)
    task = model.make()
    draw = torch.Generator().manual_seed(0)
    held = [0]

    @forge.on("boundary")
    def look(trainer: forge.Trainer) -> None:
        states = [state.values() for each in trainer.optimizers.values() for state in each.state.values()]
        moments = [value for state in states for value in state if isinstance(value, Tensor)]
        own = [p for p in trainer.task.parameters() if not p.is_meta]
        held[0] = sum(local(tensor).nbytes for tensor in (*own, *moments) if tensor.ndim)

    trainer = forge.Trainer(
        max_updates=4,
        seed=0,
        device="cpu",
        run_dir=False,
        mesh=dict(mesh) or None,
        plugins=[Accumulate(2), Clip(0.5), look, *(strategies(mesh, 2, model.plan, balance=False) if mesh else [])],
    )
    trainer.fit(task, [model.batch(draw, 8) for _ in range(8)])
    return {key: value.detach().clone() for key, value in task.state_dict().items()}, held[0]


def measure(meshes: Iterable[Mesh] = MESHES) -> Iterator[MeshRow]:
    """Yield a row for every model on every mesh that it takes."""
    logging.getLogger("forge").setLevel(logging.ERROR)
    alone = {name: fit(name, {})[0] for name in MODELS}
    for mesh in meshes:
        yield from on_ranks(_rows, math.prod(mesh.values()), mesh, alone)


def _rows(mesh: Mesh, alone: dict[str, dict[str, Tensor]]) -> list[MeshRow]:
    logging.getLogger("forge").setLevel(logging.ERROR)
    logging.getLogger("torch").setLevel(logging.ERROR)
    rows = []
    for name, model in MODELS.items():
        if not model.takes(mesh):
            continue
        weights, held = fit(name, mesh)
        apart = max(float((weights[key] - value).abs().max()) for key, value in alone[name].items())
        most = torch.tensor([apart, float(held)], dtype=torch.float64)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        expected = 3 * bytes_per_rank(model.make(), model.blocks, model.plan, mesh)
        rows.append(MeshRow(mesh, name, float(most[0]), float(most[1]) / 1e6, expected / 1e6))
    return rows


def table(rows: Iterable[MeshRow], costs: Iterable[MeshCost] = ()) -> str:
    """Return a table in Markdown: meshes down, models and the CPU time across."""
    by_mesh: dict[str, dict[str, str]] = {}
    for row in rows:
        cell = f"{row.difference:.0e}; {1e3 * row.megabytes:.1f} ({1e3 * row.expected_megabytes:.1f})"
        by_mesh.setdefault(_shown(row.mesh), {})[row.model] = cell
    for cost in costs:
        cell = f"{cost.ratio:.3f} (again {cost.again_ratio:.3f})"
        by_mesh.setdefault(_shown(cost.mesh), {})["CPU time"] = cell
    columns = [*MODELS, "CPU time"]
    lines = [["mesh", *columns], ["---"] * (1 + len(columns))]
    lines += [[shown, *(cells.get(name, "–") for name in columns)] for shown, cells in by_mesh.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(mesh: Mesh) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in mesh.items())


def write(text: str, page: Path = PAGE) -> None:
    """Write the table into the documentation, between its markers."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} has no place for the table: write {BEGIN} and {END} into it.")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
