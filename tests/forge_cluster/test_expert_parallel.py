"""expert_parallel: ranks that hold a part of the experts train what one process trains."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.errors import RecipeError, TaskError
from forge.optim.sharded import local, whole
from forge_cluster.expert_parallel import ExpertParallel
from forge_cluster.expert_parallel.routing import Ranks, route
from forge_plugins import DDP, EMA, SAM, Accumulate, Checkpoint, Clip, Compile, Freeze, Guard, Remat, Schedule
from forge_plugins.tensor_parallel import TensorParallel
from tests.support import expert_kit as kit
from tests.support import strangers_kit as strangers
from tests.support.fitted import apart
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some

EXACT = 1e-11
"""The largest difference of a weight in float64: sums are taken in another order, and nothing else."""
MESHES: list[Any] = [
    {"expert": 2},
    {"data": 2, "expert": 2},
    {"data": 1, "expert": 4},
    {"shard": 1, "expert": 2},
    {"shard": 2, "expert": 2},
    {"data": 2, "shard": 1, "expert": 2},
]


@pytest.fixture(autouse=True)
def new_ranks() -> None:
    """Begin with processes in which torch has made no other mesh."""
    for count in (2, 4):
        ranks(count).stop()


# ---------------------------------------------------------------------------------------------------------------------
# Against one process


def levers(mesh: dict[str, int]) -> dict[str, Any]:
    """All choices of the second layer fall on the experts of the first rank; others get no token."""
    return kit.fit_experts(mesh, [Accumulate(2), Clip(0.05), EMA(0.9), Schedule("linear")], kit.Mixed(tilt=9.0))


@pytest.mark.parametrize("mesh", some(MESHES))
def test_divided_experts_train_what_one_process_trains(mesh: dict[str, int]) -> None:
    alone, together = levers(mesh), ranks(math.prod(mesh.values()))(levers, mesh)
    experts = sum(v.nbytes for name, v in alone["weights"].items() if ".experts." in name)
    rest = sum(v.nbytes for name, v in alone["weights"].items() if ".experts." not in name)
    shards = mesh["shard"] * mesh["expert"] if "shard" in mesh else 1
    for rank in together:
        assert rank["updates"] == alone["updates"]
        assert apart(rank["weights"], alone["weights"]) < EXACT
        for name, values in alone["logged"].items():
            assert rank["logged"][name] == pytest.approx(values, rel=1e-11)  # each expert is in the norm once
        assert all(rank["metrics"][name] == pytest.approx(value, rel=1e-9) for name, value in alone["metrics"].items())
        assert rank["held"]["parameters"] == pytest.approx(experts / mesh["expert"] + rest / shards, abs=8)
        assert rank["held"]["state"] == 2 * (rank["held"]["parameters"] - 8)  # Adam's moments; a number has none
        assert rank["logged"]["experts/most"] == [2.0, 2.0]
        assert rank["logged"]["experts/least"] == [0.0, 0.0]


class Single(kit.Mixed):
    """One choice for each token, without a dimension for it."""

    class Switch(kit.Mixture):
        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.gate(self.norm(x)).softmax(-1).max(-1)
            return x + self.experts(weights=weights, chosen=chosen, tokens=self.norm(x))

    class Expert(kit.Experts):
        def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            hidden = torch.einsum("...d,...hd->...h", tokens, self.up[chosen])
            made = torch.einsum("...h,...dh->...d", F.gelu(hidden), self.down[chosen]) + self.bias[chosen]
            return made * weights[..., None]

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__, block.experts.__class__ = self.Switch, self.Expert


class Grouped(nn.Module):
    """A layer of all experts."""

    def __init__(self, inner: int, outer: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(kit.EXPERTS, outer, inner, dtype=torch.float64) / 2)

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:
        return torch.bmm(self.weight[numbers], rows[..., None])[..., 0]


class Nested(kit.Mixed):
    """Experts whose parameters are in layers, some of them frozen; counts its experts."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts = kit.EXPERTS
            self.up, self.down = Grouped(kit.WIDTH, kit.HIDDEN), Grouped(kit.HIDDEN, kit.WIDTH)
            self.up.requires_grad_(False)

        def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            marks = F.one_hot(chosen, self.num_experts).to(tokens) * weights[..., None]
            assert marks.shape[-1] == len(self.up.weight)
            rows, places, numbers = torch.where(marks != 0)
            made = self.down(torch.tanh(self.up(tokens[rows], numbers)), numbers) * marks[rows, places, numbers, None]
            return torch.zeros_like(tokens).index_add(0, rows, made)

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.experts = self.Layers()


class Skipping(kit.Mixed):
    """The experts of the second mixture are not called."""

    class Gate(kit.Mixture):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.gate(self.norm(x)).mean(-1, keepdim=True)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].__class__ = self.Gate


def kinds() -> dict[str, Callable[[], tuple[forge.TaskModule, list[Any]]]]:
    return {
        "one choice": lambda: (Single(), [Accumulate(2)]),
        "nested": lambda: (Nested(), [Clip(0.05, norm_type=math.inf), Guard("skip")]),
        "recomputed": lambda: (kit.Mixed(), [Accumulate(2), Remat("Mixture"), Clip(0.05)]),
        "sam": lambda: (kit.Mixed(), [SAM(0.05), Clip(0.05)]),
        "frozen": lambda: (kit.Mixed(), [Freeze(["blocks.0", "embed"], thaw="2 updates")]),
        "compiled": lambda: (kit.Mixed(), [Compile(backend="aot_eager", blocks="Mixture"), Accumulate(2)]),
        "unused": lambda: (Skipping(), [Clip(0.05)]),
    }


def run(kind: str, mesh: dict[str, int]) -> dict[str, Any]:
    task, plugins = kinds()[kind]()
    return kit.fit_experts(mesh, plugins, task)


KINDS: list[Any] = [
    *((kind, {"expert": 2}) for kind in kinds()),
    *((kind, {"shard": 1, "expert": 2}) for kind in ("recomputed", "compiled", "unused")),
    *((kind, {"data": 2, "expert": 2}) for kind in ("nested", "sam", "frozen", "unused")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mesh"), KINDS)
def test_kinds_of_experts_and_levers(kind: str, mesh: dict[str, int]) -> None:
    alone = run(kind, mesh)
    for rank in ranks(math.prod(mesh.values()))(run, kind, mesh):
        assert apart(rank["weights"], alone["weights"]) < EXACT
        assert rank["metrics"]["val/loss"] == pytest.approx(alone["metrics"]["val/loss"], rel=1e-9)


def beside_matrices(mesh: dict[str, int]) -> dict[str, Any]:
    return kit.fit_experts(mesh, [Clip(0.05), *([TensorParallel(plan={"head": "gather"})] if mesh else [])])


@pytest.mark.slow
def test_divided_layers_beside_divided_experts() -> None:
    alone = beside_matrices({})
    for rank in ranks(4)(beside_matrices, {"shard": 1, "expert": 2, "tensor": 2}):
        assert apart(rank["weights"], alone["weights"]) < EXACT


class Initialised(kit.Mixed):
    """Sets all its weights, module by module."""

    @torch.no_grad()
    def init_weights(self, module: nn.Module) -> None:
        for number, parameter in enumerate(module.parameters(recurse=False)):
            generator = torch.Generator().manual_seed(number + parameter.numel())
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)


def made_on_meta(mesh: dict[str, int]) -> dict[str, Any]:
    with torch.device("meta" if mesh else "cpu"):
        task = Initialised()
    if not mesh:
        task.apply(task.init_weights)
    return kit.fit_experts(mesh, [Clip(0.05)], task)


@pytest.mark.slow
def test_experts_of_a_task_without_memory_are_initialised_before_they_are_divided() -> None:
    alone = made_on_meta({})
    for rank in ranks(2)(made_on_meta, {"shard": 1, "expert": 2}):
        assert apart(rank["weights"], alone["weights"]) < EXACT


def evaluated() -> dict[str, Any]:
    """Validate and predict with weights that a fit has left in parts."""
    task, data = kit.Mixed(), kit.words(sizes=(8, 3))
    several = [DDP(), ExpertParallel(gather=False)] if "RANK" in os.environ else []
    options: Any = {"max_epochs": 1, "seed": 0, "device": "cpu", "run_dir": False}
    forge.Trainer(plugins=several, **options).fit(task, data)
    held = {name: tuple(local(p).shape) for name, p in task.named_parameters()}
    again = kit.Mixed()
    again.load_state_dict({name: whole(value) for name, value in task.state_dict().items()})
    several = [DDP(), ExpertParallel()] if several else []
    trainer = forge.Trainer(plugins=several, **options)
    return {"held": held, "metrics": trainer.validate(again, data), "predicted": trainer.predict(again, data)}


@pytest.mark.slow
def test_a_fit_leaves_parts_if_asked_and_other_verbs_divide_experts_too() -> None:
    alone = evaluated()
    for rank in ranks(2)(evaluated):
        assert rank["held"]["blocks.0.experts.up"] == (2, kit.HIDDEN, kit.WIDTH)
        assert rank["metrics"] == pytest.approx(alone["metrics"], rel=1e-9)
    assert len(alone["predicted"]) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Models of others


def of_others(kind: str) -> Any:
    sizes = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
    own = {"moe_intermediate_size": 8, "head_dim": 4}
    return {
        "qwen3": lambda: strangers.causal("Qwen3Moe", **sizes, **own, num_experts=4),
        "gpt-oss": lambda: strangers.causal("GptOss", **sizes, head_dim=4, num_local_experts=4),
        "grouped": lambda: strangers.causal("Mixtral", num_local_experts=4, experts_implementation="grouped_mm"),
    }[kind]()


def others(kind: str) -> dict[str, Any]:
    """The grouped product of matrices takes no float64."""
    task = strangers.Causal(of_others(kind))
    data = [strangers.text(size, seed) for seed, size in enumerate((4, 3))]
    several = [DDP(), ExpertParallel()] if "RANK" in os.environ else []
    trainer = forge.Trainer(max_epochs=1, seed=0, device="cpu", run_dir=False, plugins=several)
    trainer.fit(task.float() if kind == "grouped" else task, data)
    return {name: value.detach().clone() for name, value in task.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), [("qwen3", EXACT), ("gpt-oss", EXACT), ("grouped", 1e-4)])
def test_models_of_transformers_as_they_are(kind: str, most: float) -> None:
    """Mixtral is among the models of test_strangers_parallel."""
    pytest.importorskip("transformers")
    alone = others(kind)
    for rank in ranks(2)(others, kind):
        assert strangers.apart(rank, alone) < most


# ---------------------------------------------------------------------------------------------------------------------
# From one mesh to another


def resumed(folder: str, epochs: int, mesh: dict[str, int]) -> dict[str, Any]:
    plugins = [Accumulate(2), Clip(0.05), EMA(0.5), Checkpoint(every="1 epoch")]
    return kit.fit_experts(mesh, plugins, max_epochs=epochs, run_dir=folder, resume="auto", validate_every=None)


CHAINS: list[Any] = [
    [{"expert": 2}, {}, {"data": 2, "expert": 2}],
    [{}, {"shard": 2, "expert": 2}, {"expert": 2}],
    [{"data": 1, "expert": 4}, {"expert": 2}, {}],
]


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_a_checkpoint_continues_on_another_mesh_and_in_one_process(chain: list[Any], tmp_path: Path) -> None:
    straight = resumed(str(tmp_path / "straight"), len(chain), {})
    found: list[Any] = []
    for epochs, mesh in enumerate(chain, 1):
        each = ranks(math.prod(mesh.values())) if mesh else lambda call, *given: [call(*given)]
        found = each(resumed, str(tmp_path / "cut"), epochs, mesh)
    for rank in found:
        assert rank["updates"] == straight["updates"]
        assert apart(rank["weights"], straight["weights"]) < EXACT


# ---------------------------------------------------------------------------------------------------------------------
# Routing


def test_each_token_gets_the_sum_of_the_experts_that_it_chose() -> None:
    torch.manual_seed(0)
    tokens, chosen, weights = torch.randn(9, 3), torch.randint(0, 5, (9, 2)), torch.rand(9, 2)  # 4: none
    counts = [int((chosen == expert).sum()) for expert in range(4)]
    factors = torch.where(chosen < 4, (chosen + 1) * weights, 0).sum(1, keepdim=True)

    def experts(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return tokens * (chosen + 1) * weights

    found, own = route(experts, 4, Ranks(), tokens, chosen, weights)
    assert torch.allclose(found, tokens * factors)
    assert own.tolist() == counts


def test_no_tokens_and_no_choices() -> None:
    def experts(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return tokens * weights

    for tokens, chosen in ((0, torch.zeros(0, 2).long()), (3, torch.full((3, 2), 4))):
        given = torch.randn(tokens, 5), chosen, torch.rand(chosen.shape)
        assert torch.equal(route(experts, 4, Ranks(), *given)[0], torch.zeros(tokens, 5))


# ---------------------------------------------------------------------------------------------------------------------
# In one process, and refused


def fit_alone(task: forge.TaskModule, *plugins: Any, **options: Any) -> dict[str, Any]:
    return kit.fit_experts({}, [*plugins, DDP(), ExpertParallel(**options)], task, data=kit.words(sizes=(4, 3)))


def test_one_process_trains_as_without_the_plugin_and_logs_loads() -> None:
    plain, with_plugin = kit.fit_experts({}, data=kit.words(sizes=(4, 3))), fit_alone(kit.Mixed())
    assert apart(with_plugin["weights"], plain["weights"]) < EXACT
    logged = with_plugin["logged"]
    assert min(logged["experts/most"]) > 1 > max(logged["experts/least"])


def test_a_copy_of_the_task_calls_its_own_experts_and_the_task_is_given_back() -> None:
    task = kit.Mixed()
    own = dict(task.named_parameters())

    @forge.on("start")
    def copies(trainer: forge.Trainer) -> None:
        copied: Any = copy.deepcopy(trainer.task)
        (x, _), *_ = kit.words()
        before = copied(x)
        for parameter in trainer.task.parameters():
            parameter.data.zero_()
        assert torch.equal(copied(x), before)
        trainer.request_stop("seen", everywhere=True)

    fit_alone(task, copies)
    assert all(parameter is own[name] for name, parameter in task.named_parameters())
    assert all("forward" not in vars(module) for module in task.modules())


class Shared(kit.Mixed):
    """A bias for all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].experts.bias = nn.Parameter(torch.zeros(kit.WIDTH, dtype=torch.float64))


class Turned(kit.Mixed):
    """Experts that get the scores of all experts."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x)
        return self.head(self.blocks[0].experts(tokens, self.blocks[0].gate(tokens), tokens))


@pytest.mark.parametrize(
    ("task", "options", "error", "said"),
    [
        (Shared, {}, TaskError, "of blocks.1.experts .Experts. must have one row for each expert; .* bias .8,."),
        (Turned, {}, TaskError, "blocks.0.experts is called with .* A module of experts is called as experts.tokens, "),
        (kit.Mixed, {"modules": "*.exprts"}, RecipeError, "expert_parallel.modules: '..exprts' is neither a class nor"),
        (kit.Mixed, {"modules": []}, RecipeError, "expert_parallel.modules is empty"),
        (kit.Mixed, {"size": 1}, RecipeError, "expert_parallel.size is 1; it must be at least 2"),
    ],
)
def test_what_holds_no_experts_is_refused(task: Any, options: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        fit_alone(task(), **options)


class Mixing(kit.Mixed):
    """Experts that look at the mean of all tokens."""

    class Centred(kit.Experts):
        def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return super().forward(tokens - tokens.mean(0), chosen, weights)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].experts.__class__ = self.Centred


class Odd(kit.Mixed):
    """Three experts."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in list(self.blocks[0].experts.named_parameters()):
            setattr(self.blocks[0].experts, name, nn.Parameter(parameter.detach()[:3]))


def refused(task: type[kit.Mixed]) -> None:
    kit.fit_experts({"expert": 2}, [], task())


@pytest.mark.parametrize(
    ("task", "said"),
    some(
        [
            (Mixing, "TaskError: expert_parallel: blocks.1.experts (Centred) does not compute the same with 1/2 of"),
            (Odd, "blocks.0.experts has 3 experts, which 2 ranks cannot divide evenly"),
        ]
    ),
)
def test_a_module_that_cannot_be_divided_is_refused(task: type[kit.Mixed], said: str) -> None:
    errors = [each for each in ranks(2).errors(refused, task) if "PeerFailed" not in each]
    assert errors
    assert all(said in each for each in errors)
