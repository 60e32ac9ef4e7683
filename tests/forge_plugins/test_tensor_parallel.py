"""tensor_parallel: ranks that share each layer train what one process trains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import forge
from forge.errors import RecipeError
from forge_plugins import EMA, Accumulate, Checkpoint, Clip, Freeze, Remat, Schedule
from forge_plugins.fsdp import FSDP
from forge_plugins.tensor_parallel import TensorParallel
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some

EXACT = 1e-12
"""The tolerance in float64: sums are taken in another order, and nothing else."""
FOUR = pytest.param(4, marks=pytest.mark.slow)
"""Two ranks to a layer, and two such pairs that divide the batch."""


@pytest.fixture(autouse=True, scope="module")
def new_ranks() -> None:
    """Begin with processes in which torch has made no other mesh: a rank that had one crashed in a reduction."""
    ranks(2).stop()


WORDS, WIDTH, HEADS, HIDDEN = 12, 8, 4, 16

PLAN: Any = {
    "embed": "gather",
    "blocks.*.[qkv]": "column",
    "blocks.*.o": "row",
    "blocks.*.fc1": "column",
    "blocks.*.fc2": "row",
    "blocks.*.norm1": "sequence",
    "last": "replicate",
    "head": "gather",
}


class Block(nn.Module):
    """A transformer block that does not count its heads."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (part(y).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.drop(self.o(mixed.reshape(batch, length, -1)))
        return x + self.drop(self.fc2(F.gelu(self.fc1(self.norm2(x)))))


class Words(forge.TaskModule):
    """The next of twelve words."""

    def __init__(self, dropout: float = 0.0, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))

    def training_step(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def words(**options: Any) -> Words:
    torch.manual_seed(3)
    return Words(**options).double()


def sentences(seed: int = 0, sizes: tuple[int, ...] = (4, 3)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(WORDS, (size, 7), generator=generator) for size in sizes]


def train(task: Words, plugins: list[Any], replicate: int = 1, **options: Any) -> dict[str, Any]:
    """Fit; on several ranks with two to a layer."""
    several = [FSDP(replicate=replicate), TensorParallel(2, plan=PLAN)] if "RANK" in os.environ else []
    options = {"max_epochs": 2, "seed": 0, "device": "cpu", "run_dir": False, "log_every": 2, **options}
    trainer = forge.Trainer(plugins=[*plugins, *several], **options)
    result = trainer.fit(task, sentences(), sentences(1))
    weights = {name: value.detach().clone() for name, value in task.state_dict().items()}
    return {
        "weights": weights,
        "metrics": result.metrics,
        "classes": sorted({type(m).__name__ for m in task.modules()}),
    }


def stacks() -> dict[str, Any]:
    return {
        "nothing": lambda: [],
        "levers": lambda: [Accumulate(2), Clip(0.05), EMA(0.9), Remat(), Schedule("linear")],
        "frozen": lambda: [Freeze(["blocks.0.fc1", "*.norm1"], thaw="1 epoch"), Clip(max_norm=None, max_value=1e-3)],
    }


def run_stack(name: str, replicate: int = 1) -> dict[str, Any]:
    task, shapes = words(), {}

    @forge.on("start")
    def look(trainer: forge.Trainer) -> None:
        if "RANK" in os.environ:
            q = trainer.task.get_parameter("blocks.0.q.weight")
            assert isinstance(q, DTensor)
            shapes.update(q=tuple(q.to_local().shape), axes=q.device_mesh.mesh_dim_names)

    found = train(task, [*stacks()[name](), look], replicate)
    hooks = sum(len(vars(module)[kind]) for module in task.modules() for kind in vars(module) if "hooks" in kind)
    return {**found, "shapes": shapes, "hooks": hooks, "again": train(task, [], replicate)["weights"]}


@pytest.mark.parametrize(
    ("count", "name", "replicate"),
    [
        pytest.param(2, "frozen", 1, marks=pytest.mark.slow),
        pytest.param(4, "levers", 2, marks=pytest.mark.slow),
        pytest.param(4, "levers", 1, marks=pytest.mark.slow),
        pytest.param(4, "nothing", 1, marks=pytest.mark.slow),
        pytest.param(8, "levers", 2, marks=pytest.mark.slow),
        pytest.param(8, "frozen", 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_layers_train_what_one_process_trains(count: int, name: str, replicate: int) -> None:
    alone, together = run_stack(name), ranks(count)(run_stack, name, replicate)
    axes = ("shard", "tensor") if replicate == 1 else ("data", "shard", "tensor")
    for rank in together:
        assert rank["shapes"] == {"q": (WIDTH // (count // replicate), WIDTH), "axes": axes}
        assert rank["metrics"] == pytest.approx(alone["metrics"], rel=1e-6)
        assert rank["classes"] == alone["classes"]
        assert rank["hooks"] == alone["hooks"]
        for kind in ("weights", "again"):
            assert rank[kind].keys() == alone[kind].keys()
            for key, value in alone[kind].items():
                assert type(rank[kind][key]) is Tensor
                torch.testing.assert_close(rank[kind][key], value, rtol=EXACT, atol=EXACT)


def resumed(folder: str, epochs: int, replicate: int) -> dict[str, Tensor]:
    plugins = [Accumulate(2), Clip(0.05), Checkpoint(every="1 epoch")]
    return train(words(), plugins, replicate, max_epochs=epochs, run_dir=folder, resume="auto")["weights"]


@pytest.mark.slow
def test_a_checkpoint_of_three_axes_continues_in_one_process(tmp_path: Path) -> None:
    straight = resumed(str(tmp_path / "straight"), 3, 1)
    ranks(8)(resumed, str(tmp_path / "cut"), 1, 2)
    ranks(8)(resumed, str(tmp_path / "cut"), 2, 2)
    for name, value in resumed(str(tmp_path / "cut"), 3, 1).items():
        torch.testing.assert_close(value, straight[name], rtol=EXACT, atol=EXACT)


def from_meta() -> dict[str, Tensor]:
    torch.manual_seed(3)
    with torch.device("meta"):
        task = Words()
    started: dict[str, Tensor] = {}

    @forge.on("start")
    def look(trainer: forge.Trainer) -> None:
        for name, parameter in trainer.task.named_parameters():
            assert isinstance(parameter, DTensor)
            started[name] = parameter.full_tensor().detach().clone()  # on two ranks it may be the weight itself

    forge.Trainer(max_updates=1, device="cpu", run_dir=False, plugins=[FSDP(), TensorParallel(2, plan=PLAN), look]).fit(
        task, sentences()
    )
    assert all(torch.isfinite(parameter).all() for parameter in task.parameters())
    return started


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, FOUR])
def test_weights_drawn_by_block_are_those_of_a_full_task(count: int) -> None:
    torch.manual_seed(3)
    full = Words()
    for rank in ranks(count)(from_meta):
        for name, value in full.state_dict().items():
            assert torch.equal(rank[name], value), name


def dropped(seed: int | None) -> list[float]:
    torch.manual_seed(os.getpid())
    losses: list[float] = []

    class Writes(Words):
        def training_step(self, batch: Tensor) -> Tensor:
            loss = super().training_step(batch[:1])
            losses.append(loss.item())
            return loss

    task = Writes(dropout=0.5).double()
    plan: Any = {"blocks.*.fc1": "column", "blocks.*.fc2": "row"}
    trainer = forge.Trainer(
        max_updates=2, seed=seed, device="cpu", run_dir=False, plugins=[FSDP(), TensorParallel(2, plan=plan)]
    )
    trainer.fit(task, [torch.ones(4, 7, dtype=torch.int64)] * 2)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("seed", some([0, None]))
@pytest.mark.parametrize("count", [2, FOUR])
def test_ranks_that_share_layers_drop_the_same_and_others_do_not(count: int, seed: int | None) -> None:
    first, second, *others = ranks(count)(dropped, seed)
    assert first == pytest.approx(second, rel=EXACT)
    if others:
        assert others[0] == pytest.approx(others[1], rel=EXACT)
        assert first != pytest.approx(others[0], rel=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Refused


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"size": 1, "plan": PLAN}, "tensor_parallel.size is 1"),
        ({"plan": {}}, "tensor_parallel.plan is empty"),
        ({"plan": PLAN, "sequence_dim": -1}, "tensor_parallel.sequence_dim is -1"),
        ({"plan": {"head": "columns"}}, "columns"),
    ],
)
def test_a_wrong_option_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        TensorParallel(**values)


@pytest.mark.parametrize(
    ("size", "plan", "said"),
    [
        (2, {"blocks.*.fc3": "column"}, r"tensor_parallel.plan: 'blocks.\*.fc3' is neither a class nor a name"),
        (5, {"blocks.*.fc1": "column"}, "blocks.0.fc1 has out_features=16, which 5 ranks"),
        (3, {"blocks.*.fc2": "row"}, "blocks.0.fc2 has in_features=16, which 3 ranks"),
        (5, {"embed": "gather"}, "embed has embedding_dim=8, which 5 ranks"),
        (2, {"last": "row"}, "last is a LayerNorm; column, row and gather divide nn.Linear"),
        (2, {"Block": "sequence"}, "blocks.0 is a Block with layers in it"),
        (2, {"head": "row", "Linear": "column"}, "head is given both row and column"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_by_name(size: int, plan: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        TensorParallel(size, plan=plan)._planned(words())
