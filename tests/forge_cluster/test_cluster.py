"""`forge plan --cluster FILE`: the formulas against closed forms, Monte Carlo and whole dry runs."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import forge
from forge import registry
from forge.cli import main
from forge.config.build import make_plugins
from forge.config.recipe import load_recipe
from forge.data import Splits
from forge.errors import ForgeError
from forge.planning import DryStep, rows, run_dry
from forge_cluster.planning import (
    Layout,
    Model,
    Prediction,
    UpdateTiming,
    Variant,
    count_workload,
    load_cluster,
    memory_of,
    nearest_rows,
    plan_cluster,
    published_rows,
    read_cluster,
    typical_error,
)
from forge_cluster.planning.collectives import group
from forge_cluster.planning.combining import Combining, plugins_of
from forge_cluster.planning.failures import daly, expected_share, goodput, simulate_failures, young
from forge_cluster.planning.hardware import KNOWN, Efficiency, Share
from forge_cluster.planning.layouts import layouts
from forge_cluster.planning.pipeline_events import SCHEDULES, Action, closed_form, simulate
from forge_cluster.planning.ranking import _beside, _order
from forge_cluster.planning.stragglers import simulate_stragglers, slowdown
from forge_cluster.planning.workload import Workload
from tests.forge_cluster.test_meshes import EIGHT, FOUR

BLOCKS, WIDTH, LENGTH = 8, 32, 16
PLAIN = Variant("fp32", remat=False)


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
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def training_step(self, batch: Any) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def batch(samples: int = 16) -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(samples, LENGTH, dtype=torch.long)
    return tokens, tokens


@pytest.fixture(scope="module")
def work() -> Workload:
    recipe = load_recipe("default", [], [], [], task=Net, data=lambda: Splits(train=[batch()]))
    return count_workload(recipe, ("fp32",))


# -- pipelines --------------------------------------------------------------------------------------------------------


@given(st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B"]), st.integers(2, 6), st.integers(1, 3), st.integers(2, 4))
@settings(max_examples=15, deadline=None)
def test_bubbles_equal_the_closed_forms(schedule: str, ranks: int, times: int, chunks: int) -> None:
    chunks = chunks if schedule == "Interleaved1F1B" else 1
    seconds: dict[str, float] = {"F": 1 / chunks, "B": 2 / chunks}
    run = simulate(schedule, ranks, times * ranks, lambda action: seconds[action.kind], chunks=chunks)
    assert run.seconds == pytest.approx(closed_form(schedule, ranks, times * ranks, 1, 2, chunks))
    assert run.busy == pytest.approx([3.0 * times * ranks] * ranks)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubble_lies_between_its_bound_and_interleaved(ranks: int) -> None:
    run = simulate("InterleavedZeroBubble", ranks, 4 * ranks, lambda _: 0.5, chunks=2)
    assert closed_form("InterleavedZeroBubble", ranks, 4 * ranks, 1, 2, 2) <= run.seconds + 1e-9
    assert run.seconds < closed_form("Interleaved1F1B", ranks, 4 * ranks, 1, 2, 2)


def test_1f1b_holds_fewer_activations_than_gpipe() -> None:
    held = {s: simulate(s, 4, 8, lambda _: 1.0).held for s in ("GPipe", "1F1B")}
    assert held == {"GPipe": [8, 8, 8, 8], "1F1B": [4, 3, 2, 1]}


def test_a_slow_stage_sets_the_pace() -> None:
    def seconds(action: Action) -> float:
        return 2.0 if action.stage == 1 else 1.0

    run = simulate("1F1B", 2, 16, seconds)
    assert 16 * 4 <= run.seconds <= 16 * 4 + 4


# -- stragglers and failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "waits"), [(2, 1), (8, 1), (64, 1), (8, 4)])
def test_stragglers_agree_with_monte_carlo(ranks: int, waits: int) -> None:
    drawn = simulate_stragglers(ranks, 0.1, 1500, waits)
    assert slowdown(ranks, 0.1, waits) - 1 == pytest.approx(drawn - 1, rel=0.06)


@pytest.mark.parametrize(("interval", "save", "restart"), [(600.0, 20.0, 100.0), (3000.0, 60.0, 900.0)])
def test_failures_agree_with_the_exact_expectation(interval: float, save: float, restart: float) -> None:
    mean, work = 10_000.0, 3_000 * 10_000.0
    wall = simulate_failures(work, interval, save, restart, mean, random.Random(1))
    assert work / wall == pytest.approx(expected_share(interval, save, restart, mean), rel=0.01)


@pytest.mark.parametrize("gpus", [128, 4096])
def test_best_interval_agrees_with_young_and_daly(gpus: int) -> None:
    found = goodput(gpus, 0.17, 30.0, 300.0)
    assert found.young == young(30.0, 24 * 3600 / found.failures_per_day)
    assert found.interval == pytest.approx(found.daly, rel=0.25)
    mean = 24 * 3600 / found.failures_per_day
    assert found.share == pytest.approx(expected_share(daly(30.0, mean), 30.0, 300.0, mean), rel=0.005)


# -- collectives ------------------------------------------------------------------------------------------------------


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    cluster = load_cluster("h100x4")
    near, far, alone = group(cluster, 8, 1), group(cluster, 32, 1), group(cluster, 4, 8)
    reached = cluster.efficiency.links
    assert near.bandwidth == reached * 450e9
    assert far.bandwidth == reached * 400e9  # eight cards of a node
    assert alone.bandwidth == reached * 50e9
    assert near.all_reduce(8e9) == pytest.approx(2 * 7 / 8 * 8e9 / near.bandwidth, rel=0.01)
    assert group(cluster, 1, 1).all_gather(1e9) == 0


# -- the task ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_short_version_predicts_the_whole_task(work: Workload) -> None:
    whole = run_dry(Net, batch(8))
    q = work.at(PLAIN, 8)
    assert work.blocks == BLOCKS
    assert work.heads == 4
    assert work.positions == LENGTH
    assert q["parameters"] == pytest.approx(whole.parameters)
    assert q["activations"] == pytest.approx(whole.activations, rel=0.02)
    assert q["rest backward"] == pytest.approx(whole.rest("backward"), rel=0.02)


@pytest.mark.slow
def test_matrix_products_are_six_flops_a_weight_and_token(work: Workload) -> None:
    weights = sum(p.numel() for n, p in Net().named_parameters() if p.dim() == 2 and "embed" not in n)
    q = work.at(PLAIN, 16)
    assert q["matmul forward"] == 2 * weights * 16 * LENGTH
    assert q["matmul backward"] == 2 * q["matmul forward"]


@pytest.mark.slow
def test_memory_equals_the_plan_of_one_machine(work: Workload) -> None:
    whole = {(): run_dry(Net, batch(4))}
    planned = {row.strategy: row.peak for row in rows(DryStep(whole, whole, devices=4))}
    for name in ("ddp", "fsdp"):
        assert memory_of(work, Layout(name, PLAIN, shard=4)) == pytest.approx(planned[name], rel=0.05)


@pytest.mark.slow
def test_zero_divides_state_and_only_state(work: Workload) -> None:
    sizes = [memory_of(work, Layout(data, PLAIN, shard=8)) for data in ("ddp", "zero1", "zero2", "fsdp")]
    assert sizes == sorted(sizes, reverse=True)
    state = work.at(PLAIN, 1)["optimizer"]
    assert sizes[0] - sizes[1] == pytest.approx(state * 7 / 8, rel=1e-6)


@pytest.mark.slow
def test_a_measured_step_scales_computation(work: Workload) -> None:
    cluster = read_cluster({"gpu": "h100", "nodes": 1, "gpus_per_node": 1, "measured": {"seconds": 2.0, "samples": 16}})
    assert Model(work, cluster).calibrated().time(Layout("single", PLAIN)).total == pytest.approx(2.0)


@pytest.mark.slow
def test_all_layouts_use_all_gpus_and_the_best_is_fastest(work: Workload) -> None:
    found = plan_cluster(work, read_cluster({"gpu": "h100", "nodes": 2, "gpus_per_node": 4}))
    assert all(row.layout.gpus == 8 for row in found.rows)
    assert len(found.best) == 3
    assert found.considered > 50
    fastest = min((row for row in found.rows if row.fits), key=lambda row: row.seconds)
    axes = sum(size > 1 for size in (fastest.layout.replicate, fastest.layout.tensor, fastest.layout.pipeline))
    assert found.best[0].seconds <= (1 + found.error * axes) * fastest.seconds
    assert found.near
    assert found.other is not None
    assert all(other < row.seconds for other, row in zip(found.other, found.best, strict=True))  # compiled


# -- what predictions rest on ------------------------------------------------------------------------------------------


def test_every_share_says_how_it_is_known() -> None:
    for name in KNOWN:
        shares = load_cluster(name).shares
        assert shares.keys() == {"launch", *(field.name for field in dataclasses.fields(Efficiency))}
        assert {share.how for share in shares.values()} <= {"measured", "cited", "derived", "fitted"}
        assert all(share.source for share in shares.values())
    given = read_cluster({"gpu": "a100", "efficiency": {"links": 0.5}, "launch": 7})
    assert given.shares["links"] == Share(0.5, "given", "the cluster's file")
    assert given.shares["launch"].how == "given"
    assert given.shares["matmul"].value == load_cluster("a100").efficiency.matmul != Efficiency().matmul


@pytest.mark.parametrize(("name", "memory", "flops"), [("b200x4", 178, 2250e12), ("mi300xx4", 191, 1307.4e12)])
def test_newer_gpus_are_known(name: str, memory: int, flops: float) -> None:
    cluster = load_cluster(name)
    assert (cluster.gpus, cluster.memory, cluster.peak("bf16")) == (32, memory * 2**30, pytest.approx(flops))
    assert cluster.peak("fp8") == pytest.approx(2 * flops, rel=1e-3)


def test_published_rows_are_predicted_within_what_is_said() -> None:
    rows = published_rows()
    error = typical_error(rows)
    assert len(rows) >= 12
    assert len({row.source for row in rows}) >= 4
    assert 0.02 < error < 0.25
    assert sum(abs(math.log(row.ratio)) <= 2 * math.log1p(error) for row in rows) >= 0.9 * len(rows)
    assert {row.compiled for row in rows} == {True, False}


def test_the_nearest_published_rows_are_like_the_plan() -> None:
    small = nearest_rows(7e9, 4096, 8, "h100", compiled=False)
    assert all(row.cluster.gpu == "h100" and row.gpus <= 64 and row.parameters < 20e9 for row in small)
    assert not any(row.compiled for row in small)
    assert nearest_rows(400e9, 8192, 8192, "h100", compiled=False)[0].source == "Llama 3"


def row_of(seconds: float, **layout: Any) -> Prediction:
    return Prediction(Layout("fsdp", PLAIN, **layout), 1.0, UpdateTiming(seconds, 0, 0, 0), True)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.994, "as fast as the first"),
        (1.09, "as fast as"),
        (1.3, "30% slower"),
        (0.7, "30% faster than the first, with"),
    ],
)
def test_what_differs_by_less_than_the_error_is_equal(seconds: float, said: str) -> None:
    assert said in _beside(row_of(seconds, tensor=2), row_of(1.0), 0.1)


def test_an_axis_must_save_more_than_the_error() -> None:
    rows = [row_of(1.0, shard=8), row_of(0.95, shard=4, tensor=2), row_of(0.8, shard=2, tensor=4)]
    assert [row.seconds for row in sorted(rows, key=partial(_order, worth=0.1))] == [0.8, 1.0, 0.95]


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_names_three_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("gpu: a100\nnodes: 1\ngpus_per_node: 2\n")
    assert main(["plan", "quickstart", "--cluster", str(file), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["gpus"] == 2
    assert 1 <= len(plan["best"]) <= 3
    assert plan["best"][0]["command"].startswith("forge fit quickstart")
    assert "--nproc 2" in plan["best"][0]["command"]
    assert f"goodput.promised={plan['goodput']['share']:.4g}" in plan["best"][0]["command"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nodes": 1}, "lacks"),
        ({"gpu": "h100", "node": 2}, "Did you mean 'nodes'"),
        ({"gpu": "k80"}, "not known"),
        ({"gpu": "h100", "nodes": 1.5}, "whole number"),
        ({"gpu": "h100", "memory": 0}, "above 0"),
        ({"gpu": "h100", "within": {"bandwidth": 1}}, "bandwidth, latency"),
    ],
)
def test_wrong_clusters_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ForgeError, match=said):
        read_cluster(given)


def test_a_cluster_that_is_not_known_is_refused_before_torch_is_imported() -> None:
    code = "import sys; from forge.cli import main; code = main(['plan', 'quickstart', '--cluster', 'k80x2']); "
    found = subprocess.run(
        [sys.executable, "-c", code + "sys.exit(code + 10 * ('torch' in sys.modules))"], capture_output=True, text=True
    )
    assert found.returncode == 2, found.stderr
    assert "h100xN" in found.stderr


@pytest.mark.slow
def test_a_plan_that_fits_nowhere_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.yaml"
    file.write_text("gpu: a100\nnodes: 1\ngpus_per_node: 2\nmemory: 0.001\n")
    assert main(["plan", "quickstart", "--cluster", str(file)]) == 2
    assert "Nothing fits" in capsys.readouterr().out


def layout_of(data: str, variant: Variant = PLAIN, **sizes: Any) -> Layout:
    sizes = {"shard": 2, **({"schedule": "1F1B", "micros": 4} if "pipeline" in sizes else {}), **sizes}
    return Layout(data, variant, **sizes)


def test_a_plan_offers_every_mesh_that_trains() -> None:
    lines: dict[Variant, Any] = {PLAIN: ({}, {})}
    work = Workload(16, BLOCKS, 1.0, 1.0, 1.0, lines, positions=LENGTH, heads=4)
    for meshes, gpus in ((FOUR, 4), (EIGHT, 8)):
        cluster = read_cluster({"gpu": "h100", "nodes": 1, "gpus_per_node": gpus})
        offered = [layout.mesh for layout in layouts(work, cluster, Combining({}).accepts)]
        assert all(mesh in offered for mesh in meshes)
        assert all(math.prod(mesh.values()) == gpus for mesh in offered)


@pytest.mark.parametrize(
    "layout",
    [
        layout_of("ddp", tensor=2),
        layout_of("zero2", tensor=2),
        layout_of("zero1", pipeline=2),
        layout_of("ddp", context=2, pipeline=2),
        layout_of("fsdp", Variant("bf16", False), pipeline=2),
    ],
)
def test_a_plan_offers_nothing_that_a_trainer_refuses(layout: Layout) -> None:
    assert not Combining({}).accepts(layout)
    given = {name: {"plan": {"*": "column"}} if name == "tensor_parallel" else {} for name in plugins_of(layout)}
    trainer = forge.Trainer(plugins=make_plugins(given), max_updates=1, run_dir=False, mesh=layout.mesh)
    with pytest.raises(ForgeError, match=r"both provide|does not work"):
        trainer.fit(Net(), [batch()])


def test_a_plan_leaves_out_what_the_recipe_cannot_be_with() -> None:
    combining = Combining({"compile": {}, "jsonl": {}})
    assert not combining.accepts(layout_of("ddp", pipeline=2))
    assert combining.accepts(layout_of("ddp"))
    [why] = combining.left_out
    assert "'pipeline' cannot run together with 'compile'" in why


def test_a_plan_uses_options_that_the_plugins_have() -> None:
    made = [layout_of("ddp", pipeline=2, schedule=schedule) for schedule in SCHEDULES]
    made += [layout_of("fsdp", replicate=2, tensor=2), layout_of("zero2"), layout_of("fsdp", pipeline=2)]
    made += [layout_of("fsdp", Variant("bf16", True), micros=4, scatters=True), layout_of("zero1", context=2)]
    for layout in made:
        assert Combining({}).accepts(layout)
        for name, options in plugins_of(layout).items():
            kind = registry.load("plugin", name)
            assert options.keys() <= {field.name for field in dataclasses.fields(kind.Config)}
            if name != "tensor_parallel":  # its plan names layers
                kind(**options)


def test_slices_of_a_sequence_divide_state_as_samples_do() -> None:
    assert [layout_of(data, context=4).holders for data in ("ddp", "zero1", "fsdp")] == [1, 8, 8]
