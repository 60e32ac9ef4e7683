"""`forge plan --cluster`: formulas against closed forms, dry runs, published runs, and what a trainer accepts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from benchmarks import published
from forge import registry
from forge.cli import main
from forge.config import read_recipe
from forge.config.build import make_plugins
from forge.contract import axes
from forge.contract.stack import Stack
from forge.data import Splits
from forge.errors import ForgeError
from forge.planning import DryStep, rows, run_dry
from forge_cluster.planning.formulas import memory_of, time_of
from forge_cluster.planning.hardware import load_cluster
from forge_cluster.planning.layouts import Layout, layouts
from forge_cluster.planning.step import UpdateCost, count_step

WIDTH, LENGTH, BATCH = 32, 16, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(len(x), LENGTH, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Net(forge.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def training_step(self, batch: Any) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def batch(samples: int = BATCH) -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(samples, LENGTH, dtype=torch.long)
    return tokens, tokens


@pytest.fixture(scope="module")
def step() -> UpdateCost:
    return count_step(read_recipe("default", task=Net, data=lambda: Splits(train=[batch()])).checked())


def test_what_a_dry_run_counts_follows_from_the_shape(step: UpdateCost) -> None:
    weights = sum(p.numel() for n, p in Net().named_parameters() if p.dim() == 2 and "embed" not in n)
    assert step.matmul == 6 * weights * LENGTH
    assert (step.batch, step.blocks, step.hidden) == (BATCH, 8, 4 * LENGTH * WIDTH)
    assert step.forward == pytest.approx(1 / 3, abs=0.01)
    assert step.attention > 0


def test_memory_equals_the_plan_of_one_machine(step: UpdateCost) -> None:
    whole = {(): run_dry(Net, batch(BATCH // 4))}
    planned = {row.strategy: row.peak for row in rows(DryStep(whole, whole, devices=4))}
    assert memory_of(step, Layout(data=4)) == pytest.approx(planned["ddp"], rel=0.05)
    assert memory_of(step, Layout(shard=4)) == pytest.approx(planned["fsdp"], rel=0.05)


def test_zero_divides_state_and_only_state(step: UpdateCost) -> None:
    sizes = [memory_of(step, Layout(data=8, zero=stage)) for stage in (0, 1, 2)]
    assert sizes[0] - sizes[1] == pytest.approx(step.optimizer * 7 / 8)
    assert sizes[1] - sizes[2] == pytest.approx(step.gradients * 7 / 8)


@pytest.mark.parametrize("axis", ["tensor", "context", "pipe"])
def test_what_divides_a_sample_divides_its_activations(step: UpdateCost, axis: str) -> None:
    heavy = dataclasses.replace(step, held=2.0**40)
    sizes: Any = {axis: 4, "micros": 4 if axis == "pipe" else 1}
    share = {"tensor": (10 + 24 / 4) / 34, "context": 1 / 4, "pipe": 1 / 4}[axis]
    assert memory_of(heavy, Layout(**sizes)) == pytest.approx(BATCH * 2.0**40 * share, rel=0.01)


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    cluster = load_cluster("h100x4")
    links = {(8, 1): 450e9, (32, 1): 400e9, (4, 8): 50e9}  # inside, through eight cards of a node, through one
    for (ranks, stride), link in links.items():
        expected = (ranks - 1) / ranks * 8e10 / (0.82 * link)
        assert cluster.ring(8e10, ranks, stride) == pytest.approx(expected, rel=0.01)
    assert cluster.ring(1e9, 1) == 0


@pytest.mark.parametrize(("schedule", "share"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 1 / 2)])
def test_a_bubble_is_that_of_the_closed_form(step: UpdateCost, schedule: str, share: float) -> None:
    step, cluster = dataclasses.replace(step, seconds=1.6), load_cluster("h100")
    time = time_of(step, Layout(pipe=4, micros=16, schedule=schedule), cluster)
    assert time.bubble / (1.41 * 1.6 / 4) == pytest.approx(3 / 16 * share)


def test_data_parallel_waits_for_what_backward_does_not_hide(step: UpdateCost) -> None:
    cluster, layout = load_cluster("a100"), Layout(data=8)
    quick, slow = (dataclasses.replace(step, gradients=4e9, seconds=seconds) for seconds in (1e-6, 1e3))
    whole = 2 * cluster.ring(4e9, 8)
    assert time_of(quick, layout, cluster).waits == pytest.approx(whole, rel=0.01)
    assert time_of(slow, layout, cluster).waits == pytest.approx(whole / 9)  # the last of eight blocks and the rest


def test_every_strategy_is_planned_and_taken_by_a_trainer(step: UpdateCost) -> None:
    mixture = dataclasses.replace(step, batch=512, experts=step.block)
    found = [layout for name in ("h100", "h100x4") for layout in layouts(mixture, load_cluster(name))]
    named = {name for layout in found for name in layout.plugins}
    assert named == {"ddp", "zero", "fsdp", "pipeline", "tensor_parallel", "context_parallel", "expert_parallel"}
    for layout in found:
        assert layout.samplers * layout.pipe * layout.context * layout.tensor in (8, 32)
        kinds = {name: registry.load("plugin", name).Config for name in layout.plugins}
        for name, kind in kinds.items():
            assert layout.plugins[name].keys() <= {field.name for field in dataclasses.fields(kind)}
        needed = {"tensor_parallel": {"plan": {"*": "column"}}}
        stack = Stack(make_plugins({name: {**own, **needed.get(name, {})} for name, own in layout.plugins.items()}))
        stack.resolve()
        axes.refuse_unowned(layout.mesh, stack.plugins)


# -- what others have measured ----------------------------------------------------------------------------------------


def test_published_runs_are_computed_within_a_fifth() -> None:
    found = published.ratios()
    assert published.typical_error(found) < 0.2
    assert len({row.source for row in published.ROWS}) >= 5
    for row in published.ROWS:
        if row.gib:
            assert memory_of(published.step_of(row), row.layout) / 2**30 == pytest.approx(row.gib, rel=0.1)


def test_the_factor_in_use_is_the_one_that_is_fitted() -> None:
    for kind in published.KINDS:
        shares = load_cluster(kind[0].cluster).shares
        assert published.fitted(kind) == pytest.approx(shares["many"], abs=0.01)


def test_the_guides_four_gpus_are_between_three_and_four_times_as_fast() -> None:
    assert 3.4 < published.scaling_of_the_guide() < 3.7


def test_the_page_has_what_the_formulas_compute() -> None:
    assert published.table() in published.PAGE.read_text()


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_plan_says_what_to_add(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstart", "--cluster", "a100,gpus_per_node=2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["gpus"], plan["batch"]) == (2, 64)
    assert {row["words"] for row in plan["rows"]} >= {"-p ddp", "-p fsdp", "-p zero zero.stage=1"}
    fastest = [row["seconds"] for row in plan["rows"]]
    assert fastest == sorted(fastest)


def test_a_plan_that_fits_nowhere_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstart", "--cluster", "a100,gpus_per_node=2,memory=0.001"]) == 2
    assert "-p remat" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "named"), [("h100x2,node=3", "nodes"), ("h100,nodes=1.5", "1.5"), ("a100x0", "above 0"), ("k80", "h100xN")]
)
def test_a_wrong_cluster_is_refused(text: str, named: str) -> None:
    with pytest.raises(ForgeError, match=named):
        load_cluster(text)


def test_a_cluster_that_is_not_known_is_refused_before_torch_is_imported() -> None:
    code = "import sys; from forge.cli import main; code = main(['plan', 'quickstart', '--cluster', 'k80x2']); "
    last = "sys.exit(code + 10 * ('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code + last], capture_output=True).returncode == 2
